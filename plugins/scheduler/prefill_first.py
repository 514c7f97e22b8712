"""`scheduler=prefill_first`: new prompts before running answers, as SGLang does by default.

A step is either prefill or decode. Time to first token is short; a long prompt makes every running answer wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, Waiting
from minisgl.scheduler.order import check_order, order_waiting


@dataclass
class PrefillFirst:
    """Compute prompts first, whenever one fits; decode when none does."""

    order: str = "fcfs"
    """``fcfs``: as they came; ``lpm``: the longest cached prefix first."""


class PrefillFirstPolicy:
    """Prompts that were begun, then waiting ones; decode rows when there is no prompt to compute."""

    def __init__(self, order: str):
        self.order = check_order(order)

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break  # to skip it for a smaller one would starve it
            rows.append((w.uid, n))
        return Plan(rows or [(r.uid, 1) for r in running if budget.grant(r, 1)])


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "prefill_first", PrefillFirst


@hookimpl
def minisgl_scheduler(config: Any) -> PrefillFirstPolicy | None:
    return PrefillFirstPolicy(config.order) if isinstance(config, PrefillFirst) else None
