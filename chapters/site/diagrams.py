"""Diagrams for the chapters: processes and messages, states of a page, tensor parallelism, masks.

They show structure that a single run does not show. Pictures of runs are drawn from traces, by `minisgl.trace.draw`.
The diagrams use the same colours.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.trace.draw.svg import Picture, figure

__all__ = ["block", "lanes", "mask", "padding", "page_states", "processes", "ring"]

# Most diagrams have a second layout for a phone: `figure` shows the one that fits.


def draw_box(
    pic: Picture, x: float, y: float, w: float, title: str, lines: Sequence[str] = (), cls: str = "well"
) -> None:
    """Draw a box with a title and small lines of text. It is 24 pixels high, plus 14 for each line."""
    pic.rect(x, y, w, 24 + 14 * len(lines), cls, r=5)
    pic.text(x + w / 2, y + 16, title, "mid on" if cls != "well" else "mid strong")
    for i, line in enumerate(lines):
        pic.text(x + w / 2, y + 31 + 14 * i, line, "mid small on" if cls != "well" else "mid small soft")


def draw_arrow(
    pic: Picture, points: Sequence[tuple[float, float]], words: str = "", at: int = 0, dy: float = -6
) -> None:
    """Draw an arrow through ``points``, with the label ``words`` above its segment number ``at``."""
    pic.path(points, "edge")
    (x0, y0), (x1, y1) = points[-2:]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-6)
    ux, uy = (x1 - x0) / length * 6, (y1 - y0) / length * 6
    pic.path([(x1 - ux - uy / 2, y1 - uy + ux / 2), (x1, y1), (x1 - ux + uy / 2, y1 - uy - ux / 2)], "edge")
    if words:
        (a, b), (c, d) = points[at], points[at + 1]
        pic.text((a + c) / 2, (b + d) / 2 + dy, words, "mid small soft")


def processes() -> str:
    """Return the diagram of the processes of a server with two ranks, and the messages between them."""
    return figure(_processes(False), narrow=_processes(True))


def _processes(narrow: bool) -> str:
    pic = Picture("processes", "The processes of a server and their messages")
    pic.desc = (
        "A client sends HTTP requests to the API server. The API server sends Submit to a tokenizer, which sends "
        "Schedule to the process of rank 0, with the scheduler and an engine. Rank 0 sends each Step to rank 1, and "
        "Outputs to the detokenizer, which sends Replies to the API server."
    )
    if narrow:
        draw_box(pic, 0, 7, 56, "client")
        draw_box(pic, 104, 0, 90, "API server", ["no torch"], "q0")
        draw_box(pic, 252, 0, 90, "tokenizer", ["no torch"], "q3")
        draw_box(pic, 92, 102, 90, "detokenizer", ["no torch"], "q3")
        draw_box(pic, 226, 94, 116, "rank 0", ["scheduler: plans", "engine: computes"], "q2")
        draw_box(pic, 226, 184, 116, "rank 1 …", ["engine: the", "same steps"], "q2")
        draw_arrow(pic, [(56, 13), (104, 13)], "HTTP")
        draw_arrow(pic, [(104, 25), (56, 25)])
        draw_arrow(pic, [(194, 19), (252, 19)], "Submit")
        draw_arrow(pic, [(297, 38), (297, 94)])
        pic.text(291, 72, "Schedule", "small soft end")
        draw_arrow(pic, [(287, 146), (287, 184)])
        pic.text(281, 170, "Step", "small soft end")
        draw_arrow(pic, [(226, 121), (182, 121)], "Outputs")
        draw_arrow(pic, [(137, 102), (137, 38)])
        pic.text(131, 76, "Replies", "small soft end")
        return pic.render()
    draw_box(pic, 0, 70, 64, "client")
    draw_box(pic, 120, 62, 108, "API server", ["no torch"], "q0")
    draw_box(pic, 290, 0, 108, "tokenizer", ["no torch"], "q3")
    draw_box(pic, 290, 124, 108, "detokenizer", ["no torch"], "q3")
    draw_box(pic, 460, 56, 150, "rank 0", ["scheduler: plans", "engine: computes"], "q2")
    draw_box(pic, 680, 56, 120, "rank 1 …", ["engine: the", "same steps"], "q2")
    draw_arrow(pic, [(64, 78), (120, 78)], "HTTP")
    draw_arrow(pic, [(120, 90), (64, 90)])
    draw_arrow(pic, [(200, 62), (200, 18), (290, 18)], "Submit", 1)
    draw_arrow(pic, [(398, 18), (535, 18), (535, 56)], "Schedule", 0)
    draw_arrow(pic, [(610, 80), (680, 80)], "Step")
    draw_arrow(pic, [(535, 108), (535, 142), (398, 142)], "Outputs", 1)
    draw_arrow(pic, [(290, 142), (200, 142), (200, 100)], "Replies", 0)
    return pic.render()


def page_states() -> str:
    """Return the diagram of the four states of a page and their transitions."""
    return figure(_page_states(False), narrow=_page_states(True))


def _page_states(narrow: bool) -> str:
    pic = Picture("page-states", "The four states of a page")
    pic.desc = (
        "The states are free, owned by a request, cached with a number of users, and retiring. Allocate leads from "
        "free to owned, insert from owned to cached, retire from owned to retiring. A retiring page becomes free when "
        "the last launched step was read. Evict leads from cached to free, if the page has no users."
    )
    if narrow:
        draw_box(pic, 0, 100, 96, "free", ["no owner"])
        draw_box(pic, 112, 0, 114, "owned", ["by one request"], "q0")
        draw_box(pic, 246, 100, 96, "cached", ["users: 0, 1, …"], "cache")
        draw_box(pic, 112, 206, 114, "retiring", ["a launched step", "may still use it"], "retire")
        draw_arrow(pic, [(48, 100), (48, 18), (112, 18)], "allocate", 1)
        draw_arrow(pic, [(226, 18), (294, 18), (294, 100)])
        pic.text(232, 12, "insert: others", "small soft")
        pic.text(232, 34, "can use it", "small soft")
        draw_arrow(pic, [(169, 38), (169, 206)])
        pic.text(163, 70, "retire", "small soft end")
        draw_arrow(pic, [(246, 119), (96, 119)])
        pic.text(102, 113, "evict", "small soft")
        pic.text(175, 113, "no users", "small soft")
        draw_arrow(pic, [(112, 232), (48, 232), (48, 138)])
        pic.text(0, 252, "the launched", "small soft")
        pic.text(0, 266, "step was read", "small soft")
        return pic.render()
    draw_box(pic, 0, 60, 120, "free", ["no owner"])
    draw_box(pic, 270, 0, 150, "owned", ["by one request"], "q0")
    draw_box(pic, 570, 60, 150, "cached", ["users: 0, 1, 2, …"], "cache")
    draw_box(pic, 270, 122, 150, "retiring", ["a launched step may", "still access it"], "retire")
    draw_arrow(pic, [(60, 60), (60, 18), (270, 18)], "allocate", 1)
    draw_arrow(pic, [(420, 18), (645, 18), (645, 60)], "insert: other requests can use the page", 0)
    draw_arrow(pic, [(345, 38), (345, 122)])
    pic.text(352, 104, "retire", "small soft")
    draw_arrow(pic, [(270, 148), (60, 148), (60, 98)], "the launched step was read", 0)
    draw_arrow(pic, [(570, 78), (120, 78)])
    pic.text(430, 72, "evict: no users", "small soft")
    return pic.render()


def lanes() -> str:
    """Return the diagram of host and device, without and with overlap: the device needs 4 units a step, the host 2."""
    return figure(_lanes(34), narrow=_lanes(15.5))


def _lanes(unit: float) -> str:
    pic = Picture("lanes", "Host and device, without and with overlap")
    pic.desc = (
        "Without overlap, three steps take 18 units of time. With overlap, they take 14, and the device never waits."
    )
    y = 0.0
    runs: list[tuple[str, list[float], list[float]]] = [
        ("overlap=false", [0, 6, 12], [2, 8, 14]),
        ("overlap=true", [0, 2, 6], [2, 6, 10]),
    ]
    for name, host, device in runs:
        pic.text(0, y + 12, name, "strong")
        for lane, starts, wide, cls in (("host", host, 2, "q3"), ("device", device, 4, "decode")):
            y += 22
            pic.text(0, y + 13, lane, "soft")
            pic.rect(60, y, 18 * unit, 18, "well")
            for step, start in enumerate(starts):
                pic.rect(60 + start * unit + 1, y, wide * unit - 2, 18, cls, r=3)
                words = f"plan {step}" if lane == "host" else f"step {step}"
                words = words if unit > 20 else str(step)
                pic.text(60 + (start + wide / 2) * unit, y + 13, words, "mid small on")
        end = 60 + (device[-1] + 4) * unit
        pic.path([(end, y - 26), (end, y + 24)], "badline")
        y += 44
    pic.text(60, y, "time →", "small soft")
    return pic.render()


def padding(rows: int = 5, bucket: int = 8) -> str:
    """Return the diagram of a step of ``rows`` rows that is padded to its bucket."""
    return figure(_padding(rows, bucket, 150, 300), narrow=_padding(rows, bucket, 90, 200))


def _padding(rows: int, bucket: int, wide: float, right: float) -> str:
    """Draw rows of ``wide`` pixels, and the pool from the horizontal position ``right`` on."""
    pic = Picture("padding", f"{rows} rows in a bucket of {bucket}")
    pic.desc = f"{rows} rows read and write their own pages; {bucket - rows} padding rows write to the scratch page."
    pic.text(0, 12, "the recorded batch", "strong")
    pic.text(right, 12, "pool of pages", "strong")
    for row in range(bucket):
        real = row < rows
        y = 22 + 22.0 * row
        pic.rect(0, y, wide, 18, f"q{row}" if real else "free", r=3)
        pic.text(wide / 2, y + 13, f"row {row}" if real else "padding", "mid small on" if real else "mid small soft")
        target = y + 9 if real else 22 + 22.0 * rows + 20
        draw_arrow(pic, [(wide, y + 9), (right, target)])
        if real:
            pic.rect(right, y, 90, 18, f"q{row}", r=3)
            pic.text(right + 45, y + 13, "its own page", "mid small on")
    y = 22 + 22.0 * rows
    pic.rect(right, y + 8, 90, 24, "retire", r=3)
    pic.text(right + 45, y + 24, "scratch page", "mid small on")
    place = (right + 100, y + 24) if wide > 100 else (right, y + 46)
    pic.text(*place, "owned by no request", "small soft")
    return pic.render()


def block() -> str:
    """Return the diagram of a decoder layer on two ranks: the residual stream, the split matrices, the all-reduces."""
    return figure(_block(False), narrow=_block(True))


def _block(narrow: bool) -> str:
    pic = Picture("block", "A decoder layer on two ranks")
    pic.desc = (
        "A line through the whole layer is the residual stream. Each rank holds the whole residual stream. Two "
        "branches leave it. In the first branch, each rank computes the norm, its half of the query, key and value "
        "heads, the attention of these heads, and its partial sums of the output projection. An all-reduce adds the"
        " partial sums, and the result is added to the residual stream. In the second branch, each rank computes "
        "the norm, its half of gate and up, and its partial sums of down. Again an all-reduce adds the partial "
        "sums, and the result is added to the residual stream."
    )
    branches: list[list[tuple[str, str, float]]] = [
        [("norm", "well", 56), ("q k v", "q0", 58), ("attention", "q2", 80), ("o", "q1", 40)],
        [("norm", "well", 56), ("gate up", "q0", 74), ("down", "q1", 56)],
    ]
    items = [("q0", "split by outputs (column)"), ("q1", "split by inputs (row)"), ("q2", "split by heads")]
    items += [("bad", "all-reduce"), ("s5", "residual stream")]
    if not narrow:
        pic.legend(60, 12, items)
        _branches(pic, branches, 0, 52)
        return pic.render()
    top = pic.legend(0, 12, items, 342)
    for number, branch in enumerate(branches):
        _branches(pic, [branch], top - 24 + 186 * number, 0)
    return pic.render()


def _branches(pic: Picture, branches: Sequence[list[tuple[str, str, float]]], top: float, left: float) -> None:
    """Draw branches of a layer one after another on both ranks, ``top`` pixels lower and from ``left`` on."""
    box, boxes, streams = 32, (top + 62, top + 112), (top + 40, top + 166)  # rank 0 has its stream above its boxes
    x = left + 20 if left else 4.0
    adds = []
    for parts in branches:
        split = x
        x += 22 if left else 14
        for name, cls, wide in parts:
            for y in boxes:
                pic.rect(x, y, wide, box, cls, r=4)
                pic.text(x + wide / 2, y + 20, name, "mid strong" if cls == "well" else "mid on")
                pic.path([(x + wide, y + 16), (x + wide + (10 if left else 4), y + 16)], "edge")
            x += wide + (10 if left else 4)
        pic.rect(x, boxes[0], 24, boxes[1] + box - boxes[0], "bad", r=6)
        pic.text(x + 12, top + 107, "Σ", "mid on")
        adds.append(x + (44 if left else 36))
        for y, stream in zip(boxes, streams, strict=True):
            draw_arrow(pic, [(split, stream), (split, y + 16), (split + (22 if left else 14), y + 16)])
            end = stream + 8 if stream < y else stream - 8
            draw_arrow(pic, [(x + 24, y + 16), (adds[-1], y + 16), (adds[-1], end)])
        x = adds[-1] + (30 if left else 12)
    for rank, (y, stream) in enumerate(zip(boxes, streams, strict=True)):
        if left:
            pic.text(0, y + 20, f"rank {rank}", "strong")
        else:
            pic.text(adds[-1] - 30, stream + (18 if rank else -10), f"rank {rank}", "small soft end")
        pic.path([(left, stream), (x, stream)], "s5", "the residual stream")
        for add in adds:
            pic.dot(add, stream, 8, "q5", "the sum is added to the residual stream")
            pic.text(add, stream + 4, "+", "mid on")


def mask(queries: int = 3, keys: int = 8) -> str:
    """Return the diagram of a chunk's causal mask: aligned to the top left (wrong) and the bottom right (correct)."""
    pic = Picture("mask", "The causal mask of a chunk: top left is wrong, bottom right is correct")
    pic.desc = f"{queries} queries and {keys} keys; the last query has the position of the last key."
    for y0, title, offset in ((0.0, "top left: wrong", 0), (130.0, "bottom right: correct", keys - queries)):
        pic.text(0, y0 + 12, title, "strong")
        for q in range(queries):
            for k in range(keys):
                seen = k <= q + offset
                cls = ("bad" if offset == 0 else "cache") if seen else "free"
                pic.rect(26.0 * k, y0 + 22 + 26.0 * q, 24, 24, cls, query=q, key=k, seen=int(seen))
            pic.text(26.0 * keys + 6, y0 + 38 + 26.0 * q, f"query at {keys - queries + q}", "small soft")
        for k in range(keys):
            pic.text(26.0 * k + 12, y0 + 34 + 26.0 * queries, k, "mid small soft")
    return figure(pic.render())


def ring(size: int = 3) -> str:
    """Return the diagram of a ring all-reduce: per round, the ranks whose numbers each part of a vector contains.

    The parts have the numbers of the lab `ring`: part r starts on rank r + 1 and is finished on rank r.
    """
    return figure(_ring(size, False), narrow=_ring(size, True))


def _ring(size: int, narrow: bool) -> str:
    pic = Picture("ring", f"A ring all-reduce over {size} ranks")
    pic.desc = (
        f"In {size - 1} rounds, each rank sends one part to its right neighbour, which adds it. Part r starts on rank "
        f"r + 1 and is finished on rank r. In {size - 1} more rounds, each rank sends a finished part to its right "
        "neighbour, which copies it."
    )
    summed = [[{rank} for _ in range(size)] for rank in range(size)]
    y = 16.0
    for turn in range(2 * size - 1):
        adding = turn < size
        sent: dict[tuple[int, int], set[int]] = {}
        if turn:
            for rank in range(size):
                part = (rank - turn) % size if adding else (rank - (turn - size)) % size
                sent[(rank + 1) % size, part] = summed[rank][part]
            for (rank, part), ranks in sent.items():
                summed[rank][part] = summed[rank][part] | ranks if adding else set(ranks)
        title, kind = "before" if not turn else f"round {turn}", "" if not turn else "add" if adding else "copy"
        left, wide, gap = (0.0, 35.0, 12.0) if narrow else (110.0, 58.0, 30.0)
        if narrow:
            pic.text(0, y + 12, f"{title}: {kind}" if kind else title, "strong")
            y += 22 if turn else 36
        else:
            pic.text(0, y + 19, title, "strong")
            pic.text(66, y + 19, kind, "small soft")
        for rank in range(size):
            x = left + rank * (size * wide + gap)
            if not turn:
                pic.text(x, y - 6, f"rank {rank}", "soft")
            for part in range(size):
                ranks = summed[rank][part]
                done = len(ranks) == size
                cls = "cache" if done else "decode" if (rank, part) in sent else "free"
                words = "+".join(str(r) for r in sorted(ranks))
                pic.rect(x + part * wide, y, wide - 2, 28, cls, r=3, round=turn, rank=rank, part=part, ranks=words)
                style = "mid small" if cls == "free" else "mid small on"
                pic.text(x + part * wide + wide / 2 - 1, y + 18, words, style)
        y += 36
    pic.legend(left, y + 12, [("decode", "received and added"), ("cache", "finished: all ranks' numbers")], 342)
    return pic.render()
