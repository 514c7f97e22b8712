"""`scheduler=static`: static batching, used before continuous batching. A batch runs until its last request ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class Static:
    """Static batches: requests are admitted only when none runs. The rows of requests that end early stay unused."""

    def build(self) -> StaticPolicy:
        return StaticPolicy()


class StaticPolicy:
    """Plans a new batch when no request runs; otherwise prefills and then decodes the current batch."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in waiting if not running else ():
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows or [(r.uid, 1) for r in running if budget.grant(r, 1)])


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "static", Static
