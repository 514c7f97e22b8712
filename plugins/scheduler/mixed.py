"""`scheduler=mixed`: decode rows and prefill chunks in one batch.

Chunked prefill with piggybacked decodes (Sarathi-Serve, arXiv:2403.02310): a step costs at most ``max_prefill_tokens``
tokens, so no prompt, however long, makes an answer wait longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, Waiting
from minisgl.scheduler.order import check_order, order_waiting


@dataclass
class Mixed:
    """Every running answer in every step, and as much of the prompts as the step's tokens leave room for."""

    order: str = "fcfs"
    """``fcfs``: as they came; ``lpm``: the longest cached prefix first."""


class MixedPolicy:
    """Decode rows, then prompts that were begun, then waiting ones."""

    def __init__(self, order: str):
        self.order = check_order(order)

    # lab: policy.plan
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # 1. Decode rows first: their next token must not wait for anyone's prompt.
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        # 2. Then what was begun: a half-computed prompt holds a slot and pages.
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            # 3. Stop at the first that does not fit: to skip it would starve it.
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

    # lab: end


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "mixed", Mixed


@hookimpl
def minisgl_scheduler(config: Any) -> MixedPolicy | None:
    return MixedPolicy(config.order) if isinstance(config, Mixed) else None
