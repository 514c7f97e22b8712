"""Lab slo: Two kinds of requests, and limits for both.

Grade it:  python -m minisgl.lab test slo     (`hint slo` for a hint)
Serve it:  python -m minisgl plugins=my_slo.py scheduler=mine
"""

# minisgl lab slo, skeleton 36faace651 (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Budget, Plan, Running, Waiting


@dataclass
class Mine:
    """Small steps while an interactive request is open; a share of each step's prompt tokens for batch requests."""

    interactive: int = 0
    """Requests with this priority or a lower number, which is more urgent, are interactive; others are batch."""
    step_tokens: int = 512
    """Most tokens of a step while an interactive request is open: its next token waits for the whole step."""
    batch_share: float = 0.25
    """Share of a step's prompt tokens that is kept for batch prompts while interactive prompts want them all."""

    def __post_init__(self) -> None:
        if self.step_tokens < 1:
            raise ValueError(f"scheduler.step_tokens={self.step_tokens} must be at least 1.")
        if not 0 <= self.batch_share <= 1:
            raise ValueError(f"scheduler.batch_share={self.batch_share} must be a number from 0 to 1.")

    def build(self) -> MyPolicy:
        return MyPolicy(self.interactive, self.step_tokens, self.batch_share)


Request = Waiting | Running
"""What a policy sees of an open request."""
AHEAD = 32
"""How many more waiting requests than free rows a plan reads: those for which it may retract others."""


def wanted_tokens(request: Request) -> int:
    """Return how many prompt tokens a request has to compute."""
    if isinstance(request, Waiting):
        return request.num_tokens - request.num_cached_tokens
    return request.num_remaining_tokens


def urgency(request: Request) -> tuple[int, int]:
    """Order requests by priority and then by arrival."""
    return request.priority, request.arrival


class MyPolicy:
    """Plans decode rows, then interactive prompts, then batch prompts. Interactive ones may take room of batch ones."""

    uses_priority = True

    def __init__(self, interactive: int, step_tokens: int, batch_share: float):
        self.interactive, self.step_tokens, self.batch_share = interactive, step_tokens, batch_share

    def is_interactive(self, request: Request) -> bool:
        """Return whether the request is interactive."""
        return request.priority <= self.interactive

    def prompt_tokens(self, is_open: bool, decode_rows: int, budget: Budget) -> int:
        """Return how many prompt tokens a step may compute in addition to its ``decode_rows`` decode rows.

        ``is_open`` says whether an interactive request runs or waits. ``budget`` has already granted the decode rows.
        """
        # TODO slo.limit
        # 1. Without an open interactive request, large steps are best: all tokens of the budget.
        # 2. With one, prompts get at most `step_tokens` tokens less the decode rows. But they may have a quarter of
        #    `step_tokens`, rounded up, however many requests decode. They never have more than the budget.
        raise NotImplementedError

    def kept_tokens(self, tokens: int, batch: Sequence[Request]) -> int:
        """Return how many of the step's ``tokens`` prompt tokens are kept for the prompts of ``batch``."""
        # TODO slo.share
        # 1. `batch_share` of them, rounded down, and never more than these prompts want. Rounding errors of floats do
        #    not matter.
        raise NotImplementedError

    def grant(
        self, prompts: Sequence[Request], tokens: int, budget: Budget, rows: dict[int, int]
    ) -> tuple[int, Sequence[Request]]:
        """Add rows for ``prompts``, in order, with at most ``tokens`` tokens in all.

        Return the tokens that were granted, and the prompts from the first on that found no room: no page or no row.
        A prompt that gets nothing because ``tokens`` are used up is not one of them.
        """
        # TODO slo.rows
        # 1. Ask for no more than is left of `tokens`. A later prompt does not overtake one that found no room.
        raise NotImplementedError

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        # TODO slo.rows
        # 2. All decode rows, the most urgent first. They come before all prompts. Of the waiting requests, read only as
        #    many as the step can admit, and `AHEAD` more.
        # 3. In each class, partly computed prompts come before waiting requests. A waiting batch request needs a free
        #    row. A waiting interactive request may get the row of a batch request. An interactive request that
        #    `order_waiting` leaves out is open too. Reading an entry of `waiting` again costs nothing.
        # 4. The interactive prompts may use all prompt tokens except the kept tokens. The batch prompts get the rest.
        # 5. While an interactive request waits for room, no batch request is admitted: it would take the room.
        #    `make_room` gets all waiting interactive prompts, also those that were granted.
        # 6. If requests are retracted, the scheduler grants all rows again, and drops the rows that do not fit: name
        #    rows for the requests that get the room, as far as the tokens last. The tokens of retracted decode rows
        #    may stay unused, and the tokens kept for batch prompts may go to interactive ones.
        raise NotImplementedError

    def make_room(self, prompts: Sequence[Request], running: Sequence[Running], budget: Budget) -> Sequence[int]:
        """Return the uids of the batch requests to retract, so that the waiting interactive ``prompts`` fit.

        ``running`` is in order of urgency. No interactive request is retracted. `Budget.retractions` does not take
        the grants of this step into account, so ``prompts`` includes the prompts that were granted.
        """
        # TODO slo.room
        # 1. `budget.retractions` retracts the last running requests of the order that it gets, and only those behind a
        #    waiting one. It needs all running requests.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Any:
    yield "scheduler", "mine", Mine
