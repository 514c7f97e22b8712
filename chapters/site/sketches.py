"""More diagrams for the chapters: a request as a sequence, the roofline, attention over pages and in tiles, drafts.

Each fits a phone of 390 pixels; `sequence` has a second layout for wider screens. See `diagrams`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minisgl.chapters.site.diagrams import draw_arrow, draw_box
from minisgl.trace.draw.svg import NARROW, Picture, figure

__all__ = ["automaton", "blocks", "paged", "roofline", "sequence", "session", "tiles", "verify"]

LANES = (("client", "well"), ("API", "q0"), ("tokenizer", "q3"), ("rank 0", "q2"), ("rank 1", "q2"), ("detok.", "q3"))
"""Names and colours of the lanes of `sequence`."""
PARTS = (44, 40, 68, 56, 56, 58)
"""Widths of the lanes, in relation to each other."""
MESSAGES = (
    (0, 1, "POST", "the question, as JSON"),
    (1, 2, "Submit", "the chat's text"),
    (2, 3, "Schedule", "token ids"),
    (3, 4, "Step", "all rows: both ranks compute"),
    (3, 5, "Outputs", "one token id"),
    (5, 1, "Replies", "text"),
    (1, 0, "SSE", "data: {…}"),
)
"""Messages of `sequence`: from lane, to lane, name, content."""
FIRST_OF_EACH_TOKEN = 3


def sequence() -> str:
    """Return the diagram of one request through all processes: a lane for each process, time from top to bottom."""
    return figure(_sequence(760, 34), narrow=_sequence(NARROW, 40))


def _sequence(width: float, high: float) -> str:
    pic = Picture("sequence", "One request through all processes")
    pic.desc = " ".join(
        f"{LANES[a][0]} sends {name} ({content}) to {LANES[b][0]}." for a, b, name, content in MESSAGES
    ) + " The last four messages repeat for each token."  # fmt: skip
    narrow = width < 500
    wide = [(width - 3 * len(LANES)) * part / sum(PARTS) for part in PARTS]
    x = [sum(wide[:i]) + 3 * i + wide[i] / 2 for i in range(len(LANES))]
    top, bottom = 34.0, 40 + high * (len(MESSAGES) + 0.5)
    loop = top + high * FIRST_OF_EACH_TOKEN + 2
    pic.rect(0, loop, width, bottom - loop, "well", r=6)
    for place, box, (name, cls) in zip(x, wide, LANES, strict=True):
        pic.rect(place - box / 2, 0, box, 24, cls, r=5)
        pic.text(place, 16, name, "mid small on" if cls != "well" else "mid small")
        pic.path([(place, 24), (place, bottom)], "line")
    for i, (a, b, name, content) in enumerate(MESSAGES):
        y = top + high * (i + 1)
        draw_arrow(pic, [(x[a], y), (x[b], y)])
        words = name if narrow else f"{name}: {content}"
        left = min(x[a], x[b]) + 6
        back = "back" if i < FIRST_OF_EACH_TOKEN else "well"
        if narrow and left + 6.2 * len(words) > width:
            left = width - 6.2 * len(words)
        for line, text in enumerate([name, content] if narrow else [words]):
            at = min(left, width - 6.2 * len(text) - 2)
            pic.rect(at - 2, y - (28 if narrow else 17) + 13 * line, 6.1 * len(text) + 4, 12, back, r=0)
            pic.text(at, y - (18 if narrow else 7) + 13 * line, text, "small" if line == 0 else "small soft")
    pic.text(width - 6, bottom - 6, "again for each token", "small soft end")
    return pic.render()


def roofline(bandwidth: float = 4.3e12, flops: float = 790e12, weights: float = 14.0e9) -> str:
    """Return the roofline of a pass over ``weights`` 16-bit weights: tokens in the pass against arithmetic reached."""
    pic = Picture("roofline", "The roofline: how much arithmetic a pass of n tokens can use")
    left, top, wide, high = 40.0, 34.0, 280.0, 170.0
    ridge = flops / bandwidth  # tokens at which reading and computing take equally long: 2 operations per 2 bytes

    def at(tokens: float, reached: float) -> tuple[float, float]:
        return left + wide * math.log2(tokens) / 12, top + high - high * math.log2(reached / 2e12) / 9

    pic.text(left, 12, "TFLOP/s that a pass reaches", "strong")
    for reached in (4, 16, 64, 256, 790):
        y = at(1, reached * 1e12)[1]
        pic.path([(left - 3, y), (left + 3, y)], "line")
        pic.text(left - 6, y + 4, f"{reached}", "small soft end")
    for tokens in (1, 8, 64, 512, 4096):
        pic.text(at(tokens, 2e12)[0], top + high + 15, f"{tokens:,}", "small soft mid")
    pic.text(left + wide / 2, top + high + 32, "tokens in the pass", "small soft mid")
    pic.path([at(1, bandwidth), at(ridge, flops), at(4096, flops)], "s0")
    marks = ((1, "1 answer"), (16, "16 answers"), (64, "64 answers"), (2048, "a prompt"))
    for tokens, words in marks:
        x, y = at(tokens, min(tokens * bandwidth, flops))
        pic.dot(x, y, 4, "decode" if tokens < 100 else "prefill")
        pic.text(
            x + (8 if tokens < 64 else -8),
            y + (14 if tokens != 64 else 0),
            words,
            "small" if tokens < 64 else "small end",
        )
    x, y = at(ridge, flops)
    pic.path([(x, y), (x, top + high)], "wait")
    pic.text(x + 4, top + high - 8, f"{ridge:.0f} tokens", "small soft")
    pic.text(left + 6, top + 20, "memory is", "small soft")
    pic.text(left + 6, top + 34, "the limit", "small soft")
    pic.text(left + wide, y - 8, "arithmetic is the limit", "small soft end")
    pic.desc = (
        f"The line rises with the number of tokens up to {ridge:.0f}, and is flat from there on. Left of this number "
        f"the memory is the limit: a pass of one token reaches {bandwidth / 1e12:.1f} of {flops / 1e12:.0f} TFLOP/s. "
        f"{weights / 1e9:.0f} billion weights take as long to read for one token as for {ridge:.0f}."
    )
    return figure(pic.render())


def paged(table: Sequence[int] = (5, 1, 7), pool: int = 9, tail: int = 2, size: int = 4) -> str:
    """Return the diagram of a gather: a request's positions, its page table, and the pages of the pool."""
    pic = Picture("paged", "A page table maps positions to pages")
    last = len(table) * size - (size - tail) - 1
    pic.desc = (
        f"The positions 0 to {last} of a request are in pages {', '.join(map(str, table))} of the pool, in this order. "
        f"Position p is in page table[p // {size}], at place p % {size}."
    )
    cell, slot = 21.0, 24.0
    for words, x in (("positions", 0.0), ("page table", 124.0), ("pool", 246.0)):
        pic.text(x, 12, words, "strong")
    for i, page in enumerate(table):
        y = 30.0 + i * 62
        for k in range(size):
            p = i * size + k
            real = p <= last
            pic.rect(k * cell, y, cell - 2, 22, f"q{i}" if real else "free", r=3)
            if real:
                pic.text(k * cell + cell / 2 - 1, y + 15, p, "mid small on")
        pic.rect(140, y, 30, 22, "well", r=3)
        pic.text(155, y + 15, page, "mid strong")
        draw_arrow(pic, [(size * cell, y + 11), (140, y + 11)])
        draw_arrow(pic, [(170, y + 11), (246, 22 + page * slot + 10)])
    for page in range(pool):
        y = 22 + page * slot
        owner = table.index(page) if page in table else None
        for k in range(size):
            used = owner is not None and owner * size + k <= last
            pic.rect(246 + k * cell, y, cell - 2, 20, f"q{owner}" if used else "free", r=3)
            if used and owner is not None:
                pic.text(246 + k * cell + cell / 2 - 1, y + 14, owner * size + k, "mid small on")
        pic.text(332, y + 14, page, "small soft")
    return figure(pic.render())


def tiles(queries: int = 4, keys: int = 5, now: tuple[int, int] = (2, 1)) -> str:
    """Return the diagram of FlashAttention: the scores in tiles, with one tile at a time on the chip."""
    pic = Picture("tiles", "FlashAttention computes scores in tiles")
    side = 40.0
    pic.desc = (
        f"A grid of {queries} tiles of queries by {keys} tiles of keys. The tile {now} is computed. The tiles to its "
        "left are already added to the row's output, its maximum m and its sum l. The tiles above the diagonal are "
        "never computed. No tile is written to memory."
    )
    pic.text(96, 12, "tiles of keys and values →", "small soft")
    for q in range(queries):
        y = 22 + q * (side + 3)
        pic.text(88, y + side / 2 + 4, f"queries {q}", "small soft end")
        for k in range(keys):
            skipped = k > q + keys - queries
            done = (q, k) < now
            cls = "free" if skipped else "prefill" if (q, k) == now else "cache" if done else "well"
            pic.rect(96 + k * (side + 3), y, side, side, cls, r=4, query=q, key=k)
            words = "" if skipped else "now" if (q, k) == now else "done" if done else "later"
            pic.text(96 + k * (side + 3) + side / 2, y + side / 2 + 4, words, "mid small soft" if cls == "well" else
                     "mid small on")  # fmt: skip
    y = 22 + queries * (side + 3) + 10
    lines = ["m: largest score so far · l: sum of exp(score − m)", "o: sum of exp(score − m) · value"]
    draw_box(pic, 0, y, NARROW, "kept for the queries of this row, on the chip", lines)
    pic.legend(0, y + 74, [("free", "masked: never computed")])
    return figure(pic.render())


def verify() -> str:
    """Return the diagram of a verification row: the tokens of the row, what is sampled after each, what is kept."""
    pic = Picture("verify", "A step verifies four drafts")
    row = ("opens", "at", "9:30", "on", "Mon.")
    sampled = ("at", "9:30", ".", "Mon.", "…")
    right = 2
    pic.desc = (
        "The row has the last token, opens, and the drafts at, 9:30, on, Monday. After each of them a token is "
        "sampled: at, 9:30, a full stop, Monday, and another one. The first two drafts equal the sampled tokens and "
        "are accepted. The third differs: the full stop is kept in its place, and what was sampled behind it is "
        "dropped. The request gains three tokens."
    )
    left, wide = 62.0, 56.0
    for y, words in ((20.0, "the row"), (84.0, "sampled"), (150.0, "gained")):
        pic.text(0, y + 18, words, "strong")
    pic.text(left, 10, "last", "small soft")
    pic.text(left + wide, 10, "drafts →", "small soft")
    for i, (token, found) in enumerate(zip(row, sampled, strict=True)):
        x = left + i * wide
        cls = "decode" if not i else "accepted" if i <= right else "rejected"
        pic.rect(x, 20, wide - 4, 28, cls, r=4)
        pic.text(x + wide / 2 - 2, 38, token, "mid small on")
        kept = i <= right
        pic.rect(x, 84, wide - 4, 28, "decode" if kept else "free", r=4)
        pic.text(x + wide / 2 - 2, 102, found, "mid small on" if kept else "mid small soft")
        draw_arrow(pic, [(x + wide / 2 - 2, 48), (x + wide / 2 - 2, 84)])
        if i < len(row) - 1:  # the comparison of a sampled token with the draft of the next position
            sign = "=" if i < right else "≠" if i == right else ""
            pic.text(x + wide - 2, 70, sign, "mid strong")
        if kept:
            pic.rect(x, 150, wide - 4, 28, "decode", r=4)
            pic.text(x + wide / 2 - 2, 168, found, "mid small on")
            draw_arrow(pic, [(x + wide / 2 - 2, 112), (x + wide / 2 - 2, 150)])
        else:
            pic.text(x + wide / 2 - 2, 132, "dropped", "mid small soft")
    pic.legend(0, 200, [("accepted", "accepted draft"), ("rejected", "rejected draft")])
    return figure(pic.render())


def automaton() -> str:
    """Return the diagram of an automaton for a time, ``[0-9]?[0-9]:[0-9][0-9]``, and two of its masks."""
    pic = Picture("automaton", "An automaton and its masks")
    pic.desc = (
        "Six states, A to F, for the text of a time. A digit leads from A to B and from B to C. A colon leads from "
        "B and from C to D. Digits lead from D to E and from E to F, where the answer ends. Below, the tokens that are "
        "allowed in state B: 4, a colon, a colon with a digit, and not Monday or the end. In state F only the end is."
    )
    x = {"A": 14.0, "B": 78.0, "C": 142.0, "D": 206.0, "E": 268.0, "F": 328.0}
    y = 46.0
    for a, b, words in (("A", "B", "0–9"), ("B", "C", "0–9"), ("C", "D", ":"), ("D", "E", "0–9"), ("E", "F", "0–9")):
        draw_arrow(pic, [(x[a] + 13, y), (x[b] - 13, y)], words)
    draw_arrow(pic, [(x["B"], y - 13), (x["B"], 14), (x["D"], 14), (x["D"], y - 13)], ":", 1)
    for name, at in x.items():
        pic.dot(at, y, 13, "cache" if name == "F" else "q0")
        pic.text(at, y + 4, name, "mid on")
    pic.text(NARROW, y + 30, "may end here", "small soft end")
    tokens = ("4", ":", ":3", "Mon", "end")
    for row, (state, right) in enumerate((("B", {"4", ":", ":3"}), ("F", {"end"}))):
        top = 92.0 + 58 * row
        pic.text(0, top + 10, f"in state {state}, of all tokens of the vocabulary:", "small soft")
        for i, token in enumerate(tokens):
            pic.rect(i * 68, top + 16, 64, 24, "accepted" if token in right else "free", r=4)
            pic.text(i * 68 + 32, top + 32, token, "mid small on" if token in right else "mid small soft")
    pic.legend(0, 222, [("accepted", "allowed"), ("free", "forbidden: the score becomes −∞")])
    return figure(pic.render())


NUMBERS = (0.3, -0.8, 1.4, -0.2, 0.9, -1.3, 0.6, -0.5, 0.4, 11.0, -0.7, 1.0)
"""Numbers of a row of a weight, of which one is large, for `blocks`."""


def blocks() -> str:
    """Return the diagram of a row of numbers as integers, with one scale and with a scale for each half."""
    pic = Picture("blocks", "One large number, with one scale and with a scale for each block")
    pic.desc = (
        "A row of twelve numbers between -1.4 and 1.4, except one, which is 11. Above, one scale for the whole row: "
        "the steps between the integers from -7 to 7 are 1.57 wide, and all others become -1, 0 or 1. Below, a scale "
        "for each block of six: in the block without the large number, the steps are 0.20 wide, and the six numbers "
        "become six different integers."
    )
    half, wide = len(NUMBERS) // 2, NARROW / len(NUMBERS)
    pic.text(0, 10, "a row of a weight", "small soft")
    for i, number in enumerate(NUMBERS):
        pic.text(i * wide + wide / 2, 28, f"{number:g}".replace("-", "−"), "mid small")
    for k, (words, parts) in enumerate(
        (("one scale for the row", (NUMBERS,)), ("a scale for each block", (NUMBERS[:half], NUMBERS[half:])))
    ):
        top = 46.0 + 62 * k
        pic.text(0, top + 8, words, "small soft")
        at = 0
        for part in parts:
            step = max(map(abs, part)) / 7
            for number in part:
                integer = round(number / step)
                cls = "free" if integer == 0 else "accepted" if abs(integer) > 1 else "q0"
                pic.rect(at * wide + 1, top + 14, wide - 2, 22, cls, r=3)
                pic.text(
                    at * wide + wide / 2,
                    top + 29,
                    str(integer).replace("-", "−"),
                    "mid small on" if integer else "mid small soft",
                )
                at += 1
            left, right = (at - len(part)) * wide + 2, at * wide - 2
            pic.path([(left, top + 40), (right, top + 40)], "line")
            pic.text((left + right) / 2, top + 53, f"step {step:.2f}", "mid small soft")
    pic.legend(0, 178, [("free", "became 0"), ("q0", "±1"), ("accepted", "told apart")])
    return figure(pic.render())


SESSION = ((204, 0), (299, 256), (328, 304), (386, 352), (480, 432), (511, 480))
"""(prompt tokens, cached prompt tokens) of each request of `session`. Chapter 12 compares them with its run."""


def session() -> str:
    """Return the diagram of the prompts of an agent's session: which tokens were cached, and which were computed."""
    pic = Picture("session", "The prompts of an agent's session")
    sent, computed = sum(prompt for prompt, _ in SESSION), sum(prompt - cached for prompt, cached in SESSION)
    pic.desc = " ".join(
        f"Request {i} has {prompt} prompt tokens, of which {cached} are cached."
        for i, (prompt, cached) in enumerate(SESSION, 1)
    ) + f" Together they have {sent:,} tokens, of which {computed} are computed."  # fmt: skip
    left, scale = 20.0, (NARROW - 20) / max(prompt for prompt, _ in SESSION)
    pic.text(0, 10, "request, and the tokens of its prompt", "small soft")
    for i, (prompt, cached) in enumerate(SESSION):
        top, middle = 20.0 + 28 * i, left + cached * scale
        pic.text(0, top + 15, str(i + 1), "small soft")
        if cached:
            pic.rect(left, top, middle - left - 1, 22, "accepted", r=3)
            pic.text((left + middle) / 2, top + 15, str(cached), "mid small on")
        pic.rect(middle, top, (prompt - cached) * scale, 22, "q0", r=3)
        pic.text(middle + (prompt - cached) * scale / 2, top + 15, str(prompt - cached), "mid small on")
    pic.legend(0, 20.0 + 28 * len(SESSION) + 8, [("accepted", "cached"), ("q0", "computed")])
    return figure(pic.render())


HYBRID = (0, 1, 2, 6, 7, 8, 9)
"""The pages of a prompt of 12 pages that the group with a window still has, in `hybrid`."""


def hybrid(pages: int = 12, needed: int = 2) -> str:
    """Return the diagram of a cached prompt in two KV groups, with the prefixes that are valid in both."""
    kept = set(HYBRID)
    valid = [n for n in range(1, pages + 1) if kept >= set(range(max(n - needed, 0), n))]
    pic = Picture("hybrid", "A cached prompt in two KV groups")
    pic.desc = (
        f"A cached prompt of {pages} pages. The group without a window has all of them. The group with a window, whose "
        f"queries read the {needed} pages before their own, has the pages {', '.join(map(str, HYBRID))}. The others "
        f"were evicted. The prefixes of {', '.join(map(str, valid))} pages are valid: there the group with a window "
        f"has the last {needed} pages, or all if there are fewer. The longest of them is the hit."
    )
    wide = NARROW / pages
    for row, (words, has) in enumerate((("no window", set(range(pages))), (f"a window of {needed} pages", kept))):
        top = 14.0 + 52 * row
        pic.text(0, top - 4, words, "small soft")
        for page in range(pages):
            pic.rect(page * wide + 1, top, wide - 2, 22, "accepted" if page in has else "free", r=3)
            pic.text((page + 0.5) * wide, top + 15, str(page), "mid small on" if page in has else "mid small soft")
    pic.text(0, 118, "a prefix that ends here is", "small soft")
    for n in range(1, pages + 1):
        if n in valid:
            pic.dot(n * wide - wide / 2, 132, 5 if n == max(valid) else 3, "accepted")
        else:
            pic.cross(n * wide - wide / 2, 132, 4)
    pic.legend(0, 160, [("accepted", "valid"), ("cross", "not valid"), ("free", "evicted")])
    return figure(pic.render())


def passes() -> str:
    """Return the diagram of what an addition and a norm read and write, in two launches and in one."""
    pic = Picture("passes", "What an addition and a norm read and write")
    pic.desc = (
        "In two launches, the addition reads x and the residual and writes the sum, and the norm reads the sum and "
        "writes the result: five passes over as many numbers as x has. In one launch, the sum stays in registers: it "
        "is written, and not read. Four passes are left."
    )
    wide = NARROW / 5
    for row, (words, parts) in enumerate(
        (
            ("two launches", (("read x", 0), ("residual", 0), ("write sum", 1), ("read sum", 0), ("write out", 1))),
            ("one launch", (("read x", 0), ("residual", 0), ("write sum", 1), ("write out", 1))),
        )
    ):
        top = 14.0 + 58 * row
        pic.text(0, top - 4, words, "small soft")
        for i, (label, writes) in enumerate(parts):
            pic.rect(i * wide + 1, top, wide - 2, 26, "q0" if writes else "accepted", r=3)
            pic.text((i + 0.5) * wide, top + 17, label, "mid small on")
    pic.legend(0, 116, [("accepted", "read"), ("q0", "written")])
    return figure(pic.render())
