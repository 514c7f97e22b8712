"""`scheduler=prefill_first`: prompts before decode rows, as SGLang does by default.

Every step is either prefill or decode. Time to first token is short, but a long prompt delays every running request.
In a server, `minisgl.plugins.scheduler.pauses` bounds this delay.
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
    max_pause: float = 0.1
    """Seconds that the running streams of a server wait for prompts at most, as far as chunks of 1,024 prompt tokens
    allow. 0: no limit. An ``LLM`` has none."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_pause < float("inf"):
            raise ValueError(f"scheduler.max_pause={self.max_pause} must be 0 or a number of seconds.")

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
