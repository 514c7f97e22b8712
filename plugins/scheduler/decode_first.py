"""`scheduler=decode_first`: decode rows before prompts.

Every step is either decode or prefill. Inter-token latency is even. A prompt is computed when no request decodes, or
when the prompt has waited for ``patience`` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler import check_order, order_waiting
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class DecodeFirst:
    """Decode steps while any request decodes; prefill steps otherwise, or after a prompt waited ``patience`` steps."""

    order: str = "fcfs"
    """Order of waiting requests. ``fcfs``: order of arrival; ``lpm``: longest cached prefix first."""
    patience: int = 8
    """Steps that a prompt, or the next chunk of it, waits before it is computed although requests decode."""

    def build(self) -> DecodeFirstPolicy:
        return DecodeFirstPolicy(self.order, self.patience)


class DecodeFirstPolicy:
    """Plans decode rows, or prefill if none decodes or a partial or the oldest prompt waited ``patience`` steps."""

    def __init__(self, order: str, patience: int):
        self.order, self.patience = check_order(order), patience
        if patience < 1:
            raise ValueError(f"patience={patience}: patience must be at least 1 step")

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        decoding = [r for r in running if not r.num_remaining_tokens]
        prefilling = [r for r in running if r.num_remaining_tokens]
        impatient = any(r.skipped_steps >= self.patience for r in prefilling) or (
            len(waiting) > 0 and waiting[0].skipped_steps >= self.patience
        )
        rows: list[tuple[int, int]] = []
        if impatient or not decoding:
            rows = [(r.uid, n) for r in prefilling if (n := budget.grant(r, r.num_remaining_tokens))]
            for w in order_waiting(waiting, self.order):
                if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                    break
                rows.append((w.uid, n))
        return Plan(rows or [(r.uid, 1) for r in decoding if budget.grant(r, 1)])


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "decode_first", DecodeFirst
