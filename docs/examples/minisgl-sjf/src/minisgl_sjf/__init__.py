"""`scheduler=sjf`: of the waiting requests, the one with the fewest tokens left to compute is admitted first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Budget, Plan, Running, SchedulerPolicy, Waiting

__all__ = ["ShortestFirst", "Sjf"]


@dataclass
class Sjf:
    """Admit the shortest prompt first; decode every running request in every step."""

    patience: int = 8
    """How many of the oldest waiting requests are sorted by length. The other requests keep their order."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"scheduler.patience={self.patience} must be at least 1.")

    def build(self) -> SchedulerPolicy:
        """Build the policy if ``config`` is a `Sjf`."""
        return ShortestFirst(self.patience)


class ShortestFirst:
    """Decode rows first, then started prompts, then the shortest of the ``patience`` oldest waiting requests."""

    def __init__(self, patience: int):
        self.patience = patience

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Return the rows of the next step."""
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        prompts = [r for r in running if r.num_remaining_tokens]
        rows += [(r.uid, n) for r in prompts if (n := budget.grant(r, r.num_remaining_tokens))]
        # Leave out a request while an earlier request computes its next prefix page: soon the cache has this page.
        queue = [w for w in waiting if w.same_prefix_req is None]
        queue[: self.patience] = sorted(queue[: self.patience], key=lambda w: w.num_tokens - w.num_cached_tokens)
        for w in queue:
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register `Sjf` as the options of ``scheduler=sjf``."""
    yield "scheduler", "sjf", Sjf
