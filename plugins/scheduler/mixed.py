"""`scheduler=mixed`: decode rows and prefill chunks in one batch.

Chunked prefill with piggybacked decodes (Sarathi-Serve, arXiv:2403.02310). Every request that decodes has a row in
every step, so a long prompt delays its next token by at most one step. A step computes at most ``max_prefill_tokens``
tokens, decode rows included. It computes more only if decode rows alone need more than three quarters of that: then
prompts still get the other quarter, so that they are computed however many requests decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler import check_order, order_waiting
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class Mixed:
    """Every decode row in every step, then prompt chunks, for which the budget keeps a quarter of the tokens."""

    order: str = "fcfs"
    """Order of waiting requests. ``fcfs``: order of arrival; ``lpm``: longest cached prefix first."""

    def build(self) -> MixedPolicy:
        return MixedPolicy(self.order)


class MixedPolicy:
    """Plans decode rows first, then prompts that are partly computed, then waiting requests."""

    def __init__(self, order: str):
        self.order = check_order(order)

    # lab: policy.plan
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # 1. The next token of a running request does not wait for another request's prompt.
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        # 2. A request that already owns KV pages gets on before another one gets pages. The order of such requests is
        #    free. If the rest of a prompt gets nothing, the step has no tokens left.
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            # 3. Ask for all tokens of each prompt. If the request whose turn it is gets nothing, no later request gets
            #    anything: smaller ones that overtake it could starve it. This holds in both orders, whatever the
            #    priorities.
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

    # lab: end


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "mixed", Mixed
