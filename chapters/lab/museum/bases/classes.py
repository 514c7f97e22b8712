"""A policy for requests of several priorities: the most urgent first, and room for them is made at once.

A request's priority is a number, and lower is more urgent. If there is no room for a waiting request, less urgent
running requests are retracted for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class Classes:
    """The most urgent requests first. They may take the room of less urgent ones."""

    window: int = 16
    """How many waiting requests a plan reads."""

    def build(self) -> ClassPolicy:
        return ClassPolicy(self.window)


Request = Waiting | Running


class ClassPolicy:
    """Plans the rows of running requests, and then admits waiting ones in order of urgency."""

    uses_priority = True

    def __init__(self, window: int):
        self.window = window

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Plan a step. No waiting request is passed over for a less urgent one."""
        rows = self.go_on(running, budget)
        retract: Sequence[int] = ()
        for request in islice(order_waiting(waiting, "fcfs"), self.window):
            if granted := budget.grant(request, self.wanted(request)):
                rows[request.uid] = granted
            else:
                retract = self.make_room(request, running, budget, rows)
                break
        return Plan(list(rows.items()), retract)

    def go_on(self, running: Sequence[Running], budget: Budget) -> dict[int, int]:
        """Return the rows of the running requests, by uid: decode rows first, then prompts that have begun."""
        rows = {}
        for request in sorted(running, key=self.turn):
            if granted := budget.grant(request, self.wanted(request)):
                rows[request.uid] = granted
        return rows

    def wanted(self, request: Request) -> int:
        """Return how many tokens a request could compute now."""
        if isinstance(request, Waiting):
            return request.num_tokens - request.num_cached_tokens
        return request.num_remaining_tokens or 1

    def turn(self, request: Running) -> tuple[bool, int, int]:
        """Return the sort key of a running request: the smallest goes first."""
        return request.num_remaining_tokens > 0, request.priority, request.arrival

    def rank(self, request: Running) -> tuple[int, int]:
        """Return the sort key by which requests keep their room: the largest is retracted first."""
        return request.priority, request.arrival

    def make_room(
        self, request: Waiting, running: Sequence[Running], budget: Budget, rows: dict[int, int]
    ) -> Sequence[int]:
        """Return the running requests to retract for a waiting one, which then gets a row. They are less urgent."""
        if not budget.tokens:
            return ()
        ranked = sorted(running, key=self.rank)
        before = [r for r in ranked if r.priority <= request.priority]
        retract = budget.retractions([*before, request, *ranked[len(before) :]])
        if retract:
            rows[request.uid] = self.wanted(request)
        for uid in retract:
            rows.pop(uid, None)
        return retract


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "museum", Classes
