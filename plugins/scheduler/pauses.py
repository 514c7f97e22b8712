"""Short pauses: a policy that wraps a policy, so that running streams do not wait long for the prompts of others.

`scheduler=prefill_first` computes all prompts that fit before it decodes again. When many requests arrive at once, the
streams of running requests wait for all of these prompts. This wrapper counts the prompt tokens since the last step
with decode rows. When computing more of them would take longer than ``max_pause`` seconds, or has taken longer, the
next step decodes. It measures how many prompt tokens a second the engine computes, by the time between two plans.

A server has it, and an `LLM` has not: no client waits for its single tokens. It serves a policy whose options have a
field ``max_pause``. Chunked prefill with decode steps between the chunks is one of the two known ways to bound pauses;
the other one, chunks in the same step as decode rows, is `scheduler=mixed` (Sarathi-Serve, arXiv:2403.02310).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minisgl.config import Config
from minisgl.hooks import hookimpl
from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting

LEAST_TOKENS = 1024
"""Prompt tokens that may always be computed between two steps with decode rows: smaller chunks waste the device."""
SHARE = 0.6
"""The part of ``max_pause`` that prompts may take; the rest is for a step in flight, the decode step and the way to the
client."""
NUM_SAMPLES = 9
"""The speed is the second highest of this many measurements. Small steps are slower for each token, and so is one in
which kernels are compiled; and one measurement may be wrong, because the scheduler was late."""


class ShortPauses:
    """Plans as ``policy`` does, but decodes after at most as many prompt tokens as take ``max_pause`` seconds.

    ``lag`` is the number of plans after which a planned step has ended: 2 with overlap, 1 without. ``clock`` returns
    seconds.
    """

    def __init__(
        self, policy: SchedulerPolicy, max_pause: float, *, lag: int, clock: Callable[[], float] = time.monotonic
    ):
        self.policy, self.max_pause, self.lag, self.clock = policy, max_pause, lag, clock
        self._speeds = deque[float](maxlen=NUM_SAMPLES)  # prompt tokens per second
        self._planned = deque[int](maxlen=lag)  # prompt tokens of the last plans; 0: with decode rows too
        self._last_plan = 0.0
        self._tokens = 0  # prompt tokens planned since the last step with decode rows
        self._since = 0.0  # when that step was planned

    def __getattr__(self, name: str) -> Any:
        """Return an optional member of the wrapped policy."""
        return getattr(self.policy, name)

    @property
    def max_tokens(self) -> float:
        """The most prompt tokens between two steps with decode rows. Infinite until the speed is known."""
        if not self._speeds:
            return float("inf")
        speed = sorted(self._speeds)[-2:][0]
        return max(LEAST_TOKENS, int(SHARE * self.max_pause * speed))

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        """Return the plan of the wrapped policy, or one of decode rows only if these have waited long enough."""
        self._measure(bool(running))
        decoding = [r for r in running if not r.num_remaining_tokens]
        plan = Plan(())
        if decoding:
            left = self.max_tokens - self._tokens
            is_late = self._tokens >= LEAST_TOKENS and self._last_plan - self._since >= SHARE * self.max_pause
            if is_late or left < LEAST_TOKENS / 2:
                plan = self.policy.plan((), decoding, budget)
            elif left < budget.tokens:
                budget.tokens = int(left)
        if not plan.rows:  # no decode row is due, or none has found a page
            plan = self.policy.plan(waiting, running, budget)
        return self._note(plan, {r.uid for r in decoding})

    def _measure(self, is_busy: bool) -> None:
        """Measure the speed of the step that has ended since the last plan. Without running requests, none had."""
        now = self.clock()
        if not is_busy:
            self._planned.clear()
        elif len(self._planned) == self.lag and self._planned[0] >= LEAST_TOKENS / 2 and now > self._last_plan:
            self._speeds.append(self._planned[0] / (now - self._last_plan))
        self._last_plan = now

    def _note(self, plan: Plan, decoding: set[int]) -> Plan:
        """Count the prompt tokens of a plan. Return it."""
        has_decode_rows = any(uid in decoding for uid, _ in plan.rows)
        tokens = 0 if has_decode_rows else sum(count for _, count in plan.rows)
        self._planned.append(tokens)
        if has_decode_rows or not decoding:
            self._tokens, self._since = 0, self._last_plan
        else:
            self._tokens += tokens
        return plan


@hookimpl
def minisgl_wrap_policy(config: Config) -> Any:
    max_pause = getattr(config.scheduler, "max_pause", 0)
    return partial(ShortPauses, max_pause=max_pause, lag=1 + config.overlap) if max_pause else None
