"""Diagrams of what no single run shows: who talks to whom, which state follows which, how a matrix is cut.

Boxes and arrows for the chapters' pages, in the colours of `minisgl.trace.draw`. What a run can show is drawn from one
instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.trace.draw.svg import Picture, figure

__all__ = ["block", "lanes", "mask", "padding", "page_states", "processes", "ring"]


def _box(pic: Picture, x: float, y: float, w: float, title: str, lines: Sequence[str] = (), cls: str = "well") -> None:
    """A box with a title and a few small lines; 24 pixels high, and 14 more for each line."""
    pic.rect(x, y, w, 24 + 14 * len(lines), cls, r=5)
    pic.text(x + w / 2, y + 16, title, "mid on" if cls != "well" else "mid strong")
    for i, line in enumerate(lines):
        pic.text(x + w / 2, y + 31 + 14 * i, line, "mid small on" if cls != "well" else "mid small soft")


def _arrow(pic: Picture, points: Sequence[tuple[float, float]], words: str = "", at: int = 0, dy: float = -6) -> None:
    """A line with a head at its last point; ``words`` stand over its segment ``at``."""
    pic.path(points, "edge")
    (x0, y0), (x1, y1) = points[-2:]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-6)
    ux, uy = (x1 - x0) / length * 6, (y1 - y0) / length * 6
    pic.path([(x1 - ux - uy / 2, y1 - uy + ux / 2), (x1, y1), (x1 - ux + uy / 2, y1 - uy - ux / 2)], "edge")
    if words:
        (a, b), (c, d) = points[at], points[at + 1]
        pic.text((a + c) / 2, (b + d) / 2 + dy, words, "mid small soft")


def processes() -> str:
    """The processes of a server with two ranks, and the messages between them."""
    pic = Picture("processes", "The processes of a server, and what they send each other")
    pic.desc = (
        "A client talks HTTP to the API server. It sends Submit to a tokenizer, which sends Schedule to the scheduler "
        "with the engine of rank 0. That one sends each Step to rank 1, and Outputs to the detokenizer, which sends "
        "Replies back to the API server. The launcher watches all of them."
    )
    _box(pic, 0, 70, 64, "client")
    _box(pic, 120, 62, 108, "API server", ["no torch"], "q0")
    _box(pic, 290, 0, 108, "tokenizer", ["no torch"], "q3")
    _box(pic, 290, 124, 108, "detokenizer", ["no torch"], "q3")
    _box(pic, 460, 56, 150, "rank 0", ["scheduler: plans", "engine: computes"], "q2")
    _box(pic, 680, 56, 120, "rank 1 …", ["engine: the", "same steps"], "q2")
    _arrow(pic, [(64, 78), (120, 78)], "HTTP")
    _arrow(pic, [(120, 90), (64, 90)])
    _arrow(pic, [(200, 62), (200, 18), (290, 18)], "Submit", 1)
    _arrow(pic, [(398, 18), (535, 18), (535, 56)], "Schedule", 0)
    _arrow(pic, [(610, 80), (680, 80)], "Step")
    _arrow(pic, [(535, 108), (535, 142), (398, 142)], "Outputs", 1)
    _arrow(pic, [(290, 142), (200, 142), (200, 100)], "Replies", 0)
    return figure(pic.render())


def page_states() -> str:
    """The four states of a page, and what leads from one to the other."""
    pic = Picture("page-states", "The four states of a page")
    pic.desc = (
        "Free, owned by a request, cached with a count of users, retiring. Allocate leads from free to owned; insert "
        "from owned to cached; give back from owned to retiring; the last launched step was read, from retiring to "
        "free; evict, with no users, from cached to free."
    )
    _box(pic, 0, 60, 120, "free", ["nobody's"])
    _box(pic, 270, 0, 150, "owned", ["by one request"], "q0")
    _box(pic, 570, 60, 150, "cached", ["users: 0, 1, 2, …"], "cache")
    _box(pic, 270, 122, 150, "retiring", ["a launched step may", "still touch it"], "retire")
    _arrow(pic, [(60, 60), (60, 18), (270, 18)], "allocate", 1)
    _arrow(pic, [(420, 18), (645, 18), (645, 60)], "insert: the prompt is shared from now on", 0)
    _arrow(pic, [(345, 38), (345, 122)])
    pic.text(352, 104, "give back", "small soft")
    _arrow(pic, [(270, 148), (60, 148), (60, 98)], "that step was read", 0)
    _arrow(pic, [(570, 78), (120, 78)])
    pic.text(430, 72, "evict: no users", "small soft")
    return figure(pic.render())


def lanes() -> str:
    """Host and device, taking turns and overlapped. A device step takes 4 units here, the host's work 2."""
    pic = Picture("lanes", "Host and device: taking turns, and overlapped")
    pic.desc = "Taking turns, three steps take 18 units of time; overlapped, the device never waits and they take 14."
    unit, y = 34.0, 0.0
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
                pic.text(60 + (start + wide / 2) * unit, y + 13, words, "mid small on")
        end = 60 + (device[-1] + 4) * unit
        pic.path([(end, y - 26), (end, y + 24)], "badline")
        y += 44
    pic.text(60, y, "time →", "small soft")
    return figure(pic.render())


def padding(rows: int = 5, bucket: int = 8) -> str:
    """A step of some rows in its bucket."""
    pic = Picture("padding", f"{rows} rows in a bucket of {bucket}")
    pic.desc = f"{rows} rows read and write their own pages; {bucket - rows} padding rows write to the scratch page."
    pic.text(0, 12, "the recorded batch", "strong")
    pic.text(300, 12, "pool of pages", "strong")
    for row in range(bucket):
        real = row < rows
        y = 22 + 22.0 * row
        pic.rect(0, y, 150, 18, f"q{row}" if real else "free", r=3)
        pic.text(75, y + 13, f"row {row}" if real else "padding", "mid small on" if real else "mid small soft")
        target = y + 9 if real else 22 + 22.0 * rows + 20
        _arrow(pic, [(150, y + 9), (300, target)])
        if real:
            pic.rect(300, y, 90, 18, f"q{row}", r=3)
            pic.text(345, y + 13, "its own page", "mid small on")
    pic.rect(300, 22 + 22.0 * rows + 8, 90, 24, "retire", r=3)
    pic.text(345, 22 + 22.0 * rows + 24, "scratch page", "mid small on")
    pic.text(400, 22 + 22.0 * rows + 24, "belongs to nobody", "small soft")
    return figure(pic.render())


def block() -> str:
    """A decoder layer on two ranks: what is cut, and where the sums are."""
    pic = Picture("block", "A decoder layer on two ranks")
    pic.desc = (
        "On each rank: norm, its half of the query, key and value heads, attention over them, its half of the output "
        "projection's inputs; then an all-reduce. Norm, its half of gate and up, its half of down's inputs; then an "
        "all-reduce. The residual stream is whole on both ranks."
    )
    parts = [
        ("norm", "well", 62), ("q k v", "q0", 62), ("attention", "q2", 84), ("o", "q1", 40), ("Σ", "bad", 36),
        ("norm", "well", 62), ("gate up", "q0", 76), ("down", "q1", 58), ("Σ", "bad", 36),
    ]  # fmt: skip
    x = 60.0
    places = []
    for name, cls, wide in parts:
        places.append((x, wide, name, cls))
        x += wide + 14
    for rank in range(2):
        y = 34 + rank * 64.0
        pic.text(0, y + 20, f"rank {rank}", "strong")
        pic.path([(52, y + 16), (x, y + 16)], "edge")
        for left, wide, name, cls in places:
            if cls != "bad":
                pic.rect(left, y, wide, 32, cls, r=4)
                pic.text(left + wide / 2, y + 20, name, "mid strong" if cls == "well" else "mid on")
    for left, wide, name, cls in places:
        if cls == "bad":
            pic.rect(left, 34, wide, 96, cls, r=6)
            pic.text(left + wide / 2, 86, name, "mid on")
    items = [("q0", "cut by outputs (column)"), ("q1", "cut by inputs (row)"), ("q2", "whole heads")]
    pic.legend(60, 12, [*items, ("bad", "all-reduce")])
    return figure(pic.render())


def mask(queries: int = 3, keys: int = 8) -> str:
    """What a chunk's queries see: with the mask in the top left corner, and in the bottom right one."""
    pic = Picture("mask", "The causal mask of a chunk: top left is wrong, bottom right is right")
    pic.desc = f"{queries} queries over {keys} keys; the last query is at the last key."
    for y0, title, offset in ((0.0, "top left: wrong", 0), (130.0, "bottom right: right", keys - queries)):
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
    """The rounds of a ring all-reduce: which ranks' numbers each part of each rank's vector holds."""
    pic = Picture("ring", f"A ring all-reduce over {size} ranks")
    pic.desc = (
        f"{size - 1} rounds in which each rank sends one part to its right neighbour, which adds it; then {size - 1} "
        "rounds in which finished parts travel on."
    )
    held = [[{rank} for _ in range(size)] for rank in range(size)]
    y = 16.0
    for turn in range(2 * size - 1):
        adding = turn < size
        sent: dict[tuple[int, int], set[int]] = {}
        if turn:
            for rank in range(size):
                part = (rank - turn + 1) % size if adding else (rank + 1 - (turn - size)) % size
                sent[(rank + 1) % size, part] = held[rank][part]
            for (rank, part), ranks in sent.items():
                held[rank][part] = held[rank][part] | ranks if adding else set(ranks)
        pic.text(0, y + 19, "before" if not turn else f"round {turn}", "strong")
        pic.text(66, y + 19, "" if not turn else "add" if adding else "copy", "small soft")
        for rank in range(size):
            x = 110 + rank * (size * 58 + 30.0)
            if not turn:
                pic.text(x, y - 6, f"rank {rank}", "soft")
            for part in range(size):
                ranks = held[rank][part]
                done = len(ranks) == size
                cls = "cache" if done else "decode" if (rank, part) in sent else "free"
                words = "+".join(str(r) for r in sorted(ranks))
                pic.rect(x + part * 58, y, 56, 28, cls, r=3, round=turn, rank=rank, part=part, ranks=words)
                pic.text(x + part * 58 + 28, y + 18, words, "mid small" if cls == "free" else "mid small on")
        y += 36
    pic.legend(110, y + 12, [("decode", "received and added"), ("cache", "finished: all ranks' numbers")])
    return figure(pic.render())
