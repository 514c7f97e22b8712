"""Two sliders for the chapters, chunk and page size: what each value does to the course's workload, all else as in
``stage=6``.

The counts are real runs of the real scheduler on the simulated engine, measured once and kept in
``sliders/sliders.json``; ``python -m minisgl.course.site.sliders`` measures them anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from minisgl.course.ladder.workload import workload
from minisgl.testing.drive import Job
from minisgl.testing.simulate import greedy, simulate
from minisgl.trace import events as ev
from minisgl.trace.draw.svg import theme
from minisgl.trace.history import gaps, turns
from minisgl.trace.read import Trace
from minisgl.trace.view import embed

__all__ = ["fragment", "measure", "page"]

POOL = 8192
"""Tokens of KV."""
VALUES = {"chunk": (32, 64, 128, 256, 512, 1024, 2048), "page": (1, 4, 16, 64, 128, 256, 512, 1024, 2048)}
CHUNK, PAGE = 128, 16
"""What the other slider's value is meanwhile."""


def jobs() -> list[Job]:
    """The course's 44 requests."""
    return [greedy(i, each.ask.prompt, each.ask.output, each.step) for i, each in enumerate(workload())]


def measure(kind: str, value: int, clients: Sequence[Job]) -> dict[str, Any]:
    """One run: its counts, and the work of each step as [prefill, decode] tokens."""
    chunk, page_size = (value, PAGE) if kind == "chunk" else (CHUNK, value)
    trace = simulate(
        clients,
        policy="mixed",
        order="lpm",
        page_size=page_size,
        num_pages=POOL // page_size,
        max_prefill_tokens=chunk,
        overlap=False,
        max_len=2048,
    )
    return {"value": value, **counts(trace)}


def counts(trace: Trace) -> dict[str, Any]:
    """What the sliders show of a run."""
    size = trace.spec.page_size
    work, most, wasted, writes = [], 0, 0, 0
    added: dict[int, tuple[int, int]] = {}  # uid -> work done when it came, prompt length
    first: dict[int, int] = {}  # uid -> work from then to its first token
    done = 0
    for turn, state in turns(trace):
        for event in turn.events:
            if isinstance(event, ev.Add):
                added[event.uid] = (done, len(event.prompt_ids))
            elif isinstance(event, ev.Batch):
                writes += len(event.page_table_updates[0])
        prefill = sum(row.count for row in turn.rows if not row.decode)
        work.append([prefill, turn.tokens - prefill])
        done += turn.tokens
        most = max(most, len(state.running))
        held = [(int((state.table[req.slot] >= 0).sum()), len(req.tokens)) for req in state.running.values()]
        wasted = max(wasted, sum(max(pages * size - tokens, 0) for pages, tokens in held))
        for row in turn.rows:
            if row.gained:
                first.setdefault(row.uid, done - added[row.uid][0])
    longest = max(length for _, length in added.values())
    return {
        "steps": len(work),
        "running": most,
        "prefilled": sum(prefill for prefill, _ in work),
        "gap": max(gap.tokens for gap in gaps(trace)),
        "first": max(wait for uid, wait in first.items() if added[uid][1] == longest),
        "wasted": wasted,
        "writes": writes,
        "work": work,
    }


def fragment(kind: str) -> str:
    """HTML of the slider ``chunk`` or ``page``, for a page of the site; several may stand in one page."""
    here = files("minisgl.course.site") / "sliders"
    runs = json.loads((here / "sliders.json").read_text("utf-8"))[kind]
    script = (here / "sliders.js").read_text("utf-8").replace("/* data */", embed({"kind": kind, "runs": runs}))
    style = theme(".mg-slider") + (here / "sliders.css").read_text("utf-8")
    return f'<div class="mg-slider" data-kind="{kind}"><style>{style}</style><script>{script}</script></div>'


def page() -> str:
    """Both sliders as a page of their own."""
    both = "".join(fragment(kind) for kind in VALUES)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    look = "body{max-width:820px;margin:12px auto;padding:0 12px;background:#fff}"
    dark = "@media (prefers-color-scheme:dark){body{background:#1e2129}}"
    return (
        f'<!doctype html><html lang="en"><head>{head}<link rel="icon" href="data:,"><title>Chunk and page size</title>'
        f"<style>{look}{dark}</style></head><body>{both}</body></html>"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every value anew and write ``sliders/sliders.json``; or write a page of both sliders."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.course.site.sliders", description=main.__doc__)
    parser.add_argument("--html", type=Path, metavar="FILE", help="only write a page of both sliders, as they are")
    args = parser.parse_args(argv)
    if args.html:
        args.html.write_text(page(), encoding="utf-8")
        return
    clients = jobs()
    found = {kind: [measure(kind, value, clients) for value in values] for kind, values in VALUES.items()}
    target = Path(__file__).parent / "sliders" / "sliders.json"
    target.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
