"""Runs of the simulated engine that pages show.

The two runs of the home page are a policy of chapter 0 before and after the change of one line. The run of the trace
viewer is small, and has one example of everything that a scheduler does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl.chapters.site.sliders import POOL, jobs
from minisgl.testing.simulate import greedy, simulate
from minisgl.trace.read import Trace

__all__ = ["AFTER", "BEFORE", "two_runs", "walk"]

POLICY = Path(__file__).parents[2] / "chapters" / "00_start" / "mine.py"
BEFORE, AFTER = "prompts or answers", "answers + prompts"


def two_runs() -> list[tuple[str, Trace]]:
    """Run the workload of the course with both policies and the sizes of ``stage=6``; return (changed text, trace)."""
    source = POLICY.read_text(encoding="utf-8")
    found = []
    for text in (BEFORE, AFTER):
        variables: dict[str, Any] = {"__name__": "mine"}
        exec(compile(source.replace(BEFORE, text), POLICY.name, "exec"), variables)
        trace = simulate(
            jobs(),
            policy=variables["MyPolicy"](),
            num_pages=POOL // 16,
            max_prefill_tokens=128,
            max_seq_len=2048,
            overlap=False,
            name=text,
        )
        found.append((text, trace))
    return found


def walk() -> Trace:
    """Run twelve requests in a pool that is too small for them: chunks, hits, drafts, evictions, retractions."""
    books = [range(10, 42), range(50, 82)]
    clients = [
        greedy(uid, [*books[uid % 2], *range(90 + uid, 98 + uid + 3 * (uid % 4))], 20 + 4 * (uid % 3), 2 * uid)
        for uid in range(12)
    ]
    return simulate(
        clients,
        order="lpm",
        page_size=4,
        num_pages=36,
        max_running_requests=5,
        max_prefill_tokens=16,
        overlap=False,
        drafts=(3, 70, 1),
        name="a small server",
    )
