"""Two sliders for the chapters: the effect of the chunk size and of the page size on the workload of the course.

All other options are those of ``stage=6``. The counts come from runs of the real scheduler on the simulated engine.
They are stored in ``sliders/sliders.json``; ``python -m minisgl.chapters.site.sliders`` measures them again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from minisgl.chapters.ladder.workload import workload
from minisgl.testing.drive import Job
from minisgl.testing.simulate import greedy, simulate
from minisgl.trace import events as ev
from minisgl.trace.draw.svg import theme
from minisgl.trace.history import gaps, turns
from minisgl.trace.read import Trace
from minisgl.trace.view import embed

__all__ = ["fragment", "measure", "page"]

POOL = 8192
"""Size of the KV pool, in tokens."""
VALUES = {"chunk": (32, 64, 128, 256, 512, 1024, 2048), "page": (1, 4, 16, 64, 128, 256, 512, 1024, 2048)}
CHUNK, PAGE = 128, 16
"""Chunk size while the page size varies, and page size while the chunk size varies."""


def jobs() -> list[Job]:
    """Return the 44 requests of the course as jobs of the simulated engine."""
    return [greedy(i, each.request.prompt_ids, each.request.output_len, each.step) for i, each in enumerate(workload())]


def measure(kind: str, value: int, clients: Sequence[Job]) -> dict[str, Any]:
    """Run the workload once. Return its counts, and the tokens of each step as [prefill, decode]."""
    chunk, page_size = (value, PAGE) if kind == "chunk" else (CHUNK, value)
    trace = simulate(
        clients,
        policy="mixed",
        order="lpm",
        page_size=page_size,
        num_pages=POOL // page_size,
        max_prefill_tokens=chunk,
        overlap=False,
        max_seq_len=2048,
    )
    return {"value": value, **counts(trace)}


def counts(trace: Trace) -> dict[str, Any]:
    """Return the counts of a run that the sliders show."""
    size = trace.spec.page_size
    work, most, wasted, writes = [], 0, 0, 0
    added: dict[int, tuple[int, int]] = {}  # uid -> (tokens computed before its arrival, prompt length)
    first: dict[int, int] = {}  # uid -> tokens computed between its arrival and its first token
    done = 0
    for turn, state in turns(trace):
        for event in turn.events:
            if isinstance(event, ev.Add):
                added[event.uid] = (done, len(event.prompt_ids))
            elif isinstance(event, ev.Batch):
                writes += len(event.page_table_updates[0])
        prefill = sum(row.count for row in turn.rows if not row.decode)
        work.append([prefill, turn.num_tokens - prefill])
        done += turn.num_tokens
        most = max(most, len(state.running))
        used = [
            (int((state.page_table[req.req_pool_idx] >= 0).sum()), len(req.token_ids)) for req in state.running.values()
        ]
        wasted = max(wasted, sum(max(pages * size - tokens, 0) for pages, tokens in used))
        for row in turn.rows:
            if row.kept:
                first.setdefault(row.uid, done - added[row.uid][0])
    longest = max(length for _, length in added.values())
    return {
        "steps": len(work),
        "running": most,
        "prefilled": sum(prefill for prefill, _ in work),
        "gap": max(gap.num_tokens for gap in gaps(trace)),
        "first": max(wait for uid, wait in first.items() if added[uid][1] == longest),
        "wasted": wasted,
        "writes": writes,
        "work": work,
    }


def fragment(kind: str) -> str:
    """Return the HTML of the slider ``chunk`` or ``page``, to embed in a page. A page may contain several sliders."""
    here = files("minisgl.chapters.site") / "sliders"
    runs = json.loads((here / "sliders.json").read_text("utf-8"))[kind]
    script = (here / "sliders.js").read_text("utf-8").replace("/* data */", embed({"kind": kind, "runs": runs}))
    style = theme(".mg-slider") + (here / "sliders.css").read_text("utf-8")
    return f'<div class="mg-slider" data-kind="{kind}"><style>{style}</style><script>{script}</script></div>'


def page() -> str:
    """Return an HTML page with both sliders."""
    both = "".join(fragment(kind) for kind in VALUES)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    look = "body{max-width:820px;margin:12px auto;padding:0 12px;background:#fff}"
    dark = "@media (prefers-color-scheme:dark){body{background:#1e2129}}"
    return (
        f'<!doctype html><html lang="en"><head>{head}<link rel="icon" href="data:,"><title>Chunk and page size</title>'
        f"<style>{look}{dark}</style></head><body>{both}</body></html>"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all values and write ``sliders/sliders.json``, or write a page with both sliders."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.chapters.site.sliders", description=main.__doc__)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with both sliders; measure nothing")
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
