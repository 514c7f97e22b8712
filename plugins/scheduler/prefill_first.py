"""`scheduler=prefill_first`: prompts before decode rows, as SGLang does by default.

Every step is either prefill or decode. Time to first token is short, but a long prompt delays every running request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler import check_order, order_waiting
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class PrefillFirst:
    """Prefill steps while any prompt fits; decode steps otherwise."""

    order: str = "fcfs"
    """Order of waiting requests. ``fcfs``: order of arrival; ``lpm``: longest cached prefix first."""

    def build(self) -> PrefillFirstPolicy:
        return PrefillFirstPolicy(self.order)


class PrefillFirstPolicy:
    """Plans prompts that are partly computed, then waiting requests; decode rows only if no prompt fits."""

    def __init__(self, order: str):
        self.order = check_order(order)

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break  # smaller requests that overtake this request could starve it
            rows.append((w.uid, n))
        return Plan(rows or [(r.uid, 1) for r in running if budget.grant(r, 1)])


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "prefill_first", PrefillFirst
