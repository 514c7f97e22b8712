"""Lab policy: A scheduling policy.

Grade it:  python -m minisgl.lab test policy     (`hint policy` for a hint)
Serve it:  python -m minisgl plugins=my_policy.py scheduler=mine
"""

# minisgl lab policy, skeleton 413c9d7f8d (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler import check_order, order_waiting
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class Mine:
    """Every decode row in every step, then prompt chunks, for which the budget keeps a quarter of the tokens."""

    order: str = "fcfs"
    """Order of waiting requests. ``fcfs``: order of arrival; ``lpm``: longest cached prefix first."""

    def build(self) -> MyPolicy:
        return MyPolicy(self.order)


class MyPolicy:
    """Plans decode rows first, then prompts that are partly computed, then waiting requests."""

    def __init__(self, order: str):
        self.order = check_order(order)

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # TODO policy.plan
        # 1. The next token of a running request does not wait for another request's prompt.
        # 2. A request that already owns KV pages gets on before another one gets pages. The order of such requests is
        #    free. If the rest of a prompt gets nothing, the step has no tokens left.
        # 3. Ask for all tokens of each prompt. If the request whose turn it is gets nothing, no later request gets
        #    anything: smaller ones that overtake it could starve it. This holds in both orders, whatever the
        #    priorities.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "mine", Mine
