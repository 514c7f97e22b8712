"""Lab policy: Who computes what in the next step.

Grade it:  python -m minisgl.lab test policy     (`hint policy` for a hint)
Serve it:  python -m minisgl plugins=my_policy.py scheduler=mine
"""

# minisgl lab policy, skeleton 0f2aead853 (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, Waiting
from minisgl.scheduler.order import check_order, order_waiting


@dataclass
class Mine:
    """Every running answer in every step, and as much of the prompts as the step's tokens leave room for."""

    order: str = "fcfs"
    """``fcfs``: as they came; ``lpm``: the longest cached prefix first."""


class MyPolicy:
    """Decode rows, then prompts that were begun, then waiting ones."""

    def __init__(self, order: str):
        self.order = check_order(order)

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # TODO policy.plan
        # 1. Decode rows first: their next token must not wait for anyone's prompt.
        # 2. Then what was begun: a half-computed prompt holds a slot and pages.
        # 3. Stop at the first that does not fit: to skip it would starve it.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "mine", Mine


@hookimpl
def minisgl_scheduler(config: Any) -> MyPolicy | None:
    return MyPolicy(config.order) if isinstance(config, Mine) else None
