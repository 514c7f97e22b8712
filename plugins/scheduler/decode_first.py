"""`scheduler=decode_first`: running answers before new prompts.

A step is either decode or prefill. Answers flow evenly; a prompt waits until nothing decodes, or its patience ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, Waiting
from minisgl.scheduler.order import check_order, order_waiting


@dataclass
class DecodeFirst:
    """Decode while anything decodes; compute prompts when nothing does, or when one has waited long enough."""

    order: str = "fcfs"
    """``fcfs``: as they came; ``lpm``: the longest cached prefix first."""
    patience: int = 8
    """Steps after which a prompt goes before the answers."""


class DecodeFirstPolicy:
    """Decode rows; prompts in steps of their own, when there are none or the first has waited ``patience`` steps."""

    def __init__(self, order: str, patience: int):
        self.order, self.patience = check_order(order), patience
        if patience < 1:
            raise ValueError(f"patience={patience}: at least 1 step")

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        decoding = [r for r in running if not r.num_remaining_tokens]
        begun = [r for r in running if r.num_remaining_tokens]
        impatient = any(r.skipped_steps >= self.patience for r in begun) or (
            len(waiting) > 0 and waiting[0].skipped_steps >= self.patience
        )
        rows: list[tuple[int, int]] = []
        if impatient or not decoding:
            rows = [(r.uid, n) for r in begun if (n := budget.grant(r, r.num_remaining_tokens))]
            for w in order_waiting(waiting, self.order):
                if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                    break
                rows.append((w.uid, n))
        return Plan(rows or [(r.uid, 1) for r in decoding if budget.grant(r, 1)])


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "decode_first", DecodeFirst


@hookimpl
def minisgl_scheduler(config: Any) -> DecodeFirstPolicy | None:
    return DecodeFirstPolicy(config.order, config.patience) if isinstance(config, DecodeFirst) else None
