"""A policy that admits the requests with the longest cached prefix first, because they cost the least.

A request that had to stand back for ``patience`` steps goes before all others, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class Warm:
    """Longest cached prefix first, with a limit to how long a request stands back."""

    patience: int = 12
    """Steps after which a waiting request goes first, whatever its prefix."""

    def build(self) -> WarmPolicy:
        return WarmPolicy(self.patience)


class WarmPolicy:
    """Plans decode rows, then prompts that have begun, then waiting requests."""

    def __init__(self, patience: int):
        self.patience = patience

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Plan a step. No request is passed over for a later one of the order."""
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in sorted(waiting, key=self.turn):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

    def turn(self, w: Waiting) -> tuple[bool, int, int]:
        """Return the sort key of a waiting request: the smallest goes first."""
        if w.skipped_steps >= self.patience:
            return False, 0, w.arrival
        return True, -w.num_cached_tokens, w.arrival


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "museum", Warm
