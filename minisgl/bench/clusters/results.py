"""The numbers of one run of `bench cluster`, and the table of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

ONE_CACHE = "one cache"
"""Name of the runs in which one server has the pools of all replicas as one cache, and their speed."""
BASELINE = "round_robin"
"""The policy whose TTFT is the limit of a `Goal`."""


class Served(NamedTuple):
    """What became of one request: the replica, TTFT in seconds, and the tokens as the replica counted them."""

    replica: int
    ttft: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Goal:
    """Goals of a routing policy: ``hit_share`` of the hit rate of one cache, and the largest max/mean load."""

    hit_share: float = 0.9
    load: float = 1.3

    @property
    def text(self) -> str:
        return (
            f"{self.hit_share:.0%} of the hit rate of {ONE_CACHE}, a max/mean load of {self.load} at most, and a TTFT "
            f"p99 not above that of {BASELINE}"
        )


GOAL = Goal()


@dataclass
class Row:
    """One run.

    ``max_mean_…`` is the load of the replica with most of it, divided by the mean, over the whole run: requests, and
    prompt and output tokens. ``hit_share`` is the hit rate relative to that of `ONE_CACHE`, where that was run.
    ``reached`` says whether the goal was reached; None where it does not apply.
    """

    routing: str
    replicas: int
    requests: int
    hit_rate: float
    max_mean_requests: float
    max_mean_tokens: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    requests_by_replica: list[int] = field(default_factory=list)
    failed: int = 0
    hit_share: float | None = None
    reached: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return the row as a dict, for JSON."""
        return asdict(self)


def summarize(routing: str, replicas: int, served: Sequence[Served], failed: int = 0) -> Row:
    """Return the row of a run with the given outcomes, at least one."""
    places = [each.replica for each in served]
    requests = np.bincount(places, minlength=replicas)
    tokens = np.bincount(places, [each.prompt_tokens + each.output_tokens for each in served], minlength=replicas)
    p50, p99 = (1e3 * np.percentile([each.ttft for each in served], (50, 99))).tolist()
    return Row(
        routing,
        replicas,
        len(served),
        sum(each.cached_tokens for each in served) / sum(each.prompt_tokens for each in served),
        float(requests.max() / requests.mean()),
        float(tokens.max() / tokens.mean()),
        p50,
        p99,
        requests.tolist(),
        failed,
    )


def compare(rows: Sequence[Row]) -> None:
    """Set ``hit_share`` and ``reached`` of rows with the same number of replicas."""
    whole = next((row for row in rows if row.routing == ONE_CACHE), None)
    baseline = next((row for row in rows if row.routing == BASELINE), None)
    for row in rows:
        if whole is not None and whole.hit_rate > 0:
            row.hit_share = row.hit_rate / whole.hit_rate
        if row.replicas > 1 and row not in (whole, baseline) and row.hit_share is not None and baseline is not None:
            row.reached = (
                row.hit_share >= GOAL.hit_share
                and max(row.max_mean_requests, row.max_mean_tokens) <= GOAL.load
                and row.ttft_p99_ms <= baseline.ttft_p99_ms
            )


def show(rows: Sequence[Row], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    columns = ("replicas", "routing", "hit rate", f"of {ONE_CACHE}", "max/mean requests", "tokens")
    for name in (*columns, "TTFT p50, ms", "p99, ms", "goal"):
        table.add_column(name, justify="left" if name in ("routing", "goal") else "right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.replicas != row.replicas:
            table.add_section()
        table.add_row(
            str(row.replicas),
            row.routing,
            f"{row.hit_rate:.1%}",
            "" if row.hit_share is None or row.routing == ONE_CACHE else f"{row.hit_share:.0%}",
            f"{row.max_mean_requests:.2f}",
            f"{row.max_mean_tokens:.2f}",
            f"{row.ttft_p50_ms:,.0f}",
            f"{row.ttft_p99_ms:,.0f}",
            "" if row.reached is None else "reached" if row.reached else "MISSED",
        )
    Console(width=120).print(table)
