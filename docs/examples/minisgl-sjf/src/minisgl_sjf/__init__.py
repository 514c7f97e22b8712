"""`scheduler=sjf`: of the prompts that wait, the one with the least left to compute goes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl import hookimpl
from minisgl.scheduler import Budget, Plan, Running, SchedulerPolicy, Waiting

__all__ = ["ShortestFirst", "Sjf"]


@dataclass
class Sjf:
    """The shortest prompt first; running answers always."""

    patience: int = 8
    """Of so many prompts that wait, the first may be passed over; beyond that, those that came first go first."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"scheduler.patience={self.patience} must be at least 1.")


class ShortestFirst:
    """Answers, then prompts that were begun, then the shortest of the ``patience`` that have waited longest."""

    def __init__(self, patience: int):
        self.patience = patience

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        queue = [
            w for w in waiting if w.same_prefix_req is None
        ]  # a twin had better wait for the prefix that is being computed
        queue = (
            sorted(queue[: self.patience], key=lambda w: w.num_tokens - w.num_cached_tokens) + queue[self.patience :]
        )
        for w in queue:
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "scheduler", "sjf", Sjf


@hookimpl
def minisgl_scheduler(config: Any) -> SchedulerPolicy | None:
    return ShortestFirst(config.patience) if isinstance(config, Sjf) else None
