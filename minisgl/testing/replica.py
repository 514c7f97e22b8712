"""A replica without a model: the real scheduler, prefix cache and KV events, on a clock that only counts.

`StepCost` gives the seconds of a step. A run of steps in which the same requests decode is one step of the scheduler:
its rows verify drafts that are all accepted. It takes the time of the steps for which it stands.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import numpy as np
import pluggy

from minisgl import hooks
from minisgl.cluster.kv_events import AnyEvent
from minisgl.config import Config
from minisgl.core import I32, EngineSpec, Finished, Req, SamplingParams, Step, StepResult
from minisgl.plugins.cache.base import PrefixCache
from minisgl.plugins.cache.prefix import make_manager
from minisgl.plugins.scheduler.guard import StarvationGuard
from minisgl.plugins.speculation import DraftProposer
from minisgl.scheduler import Scheduler
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.scheduler.observer import HookObserver
from minisgl.testing.null import NullEngine

__all__ = ["Notice", "SimReplica", "StepCost"]

MAX_RUN = 4096
"""Most steps that one step of the scheduler may stand for."""
TOKEN = 1
"""Every output token."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: a sum of terms, each of which grows with a number of tokens."""

    step: float
    """Of any step: reading the weights, and launches."""
    prompt_token: float
    """Of each prompt token, apart from its attention."""
    prompt_context: float
    """Of each prompt token and token before it: the attention of prefill."""
    decode_row: float
    """Of each row that decodes, apart from its attention."""
    decode_context: float
    """Of each token before a row that decodes: reading its keys and values."""

    def faster(self, factor: float) -> StepCost:
        """Return the costs of a machine that is faster by ``factor``."""
        return StepCost(*(getattr(self, name) / factor for name in self.__dataclass_fields__))

    def prefill(self, starts: I32, tokens: I32) -> float:
        """Return the seconds of chunks of ``tokens[i]`` prompt tokens from position ``starts[i]`` on."""
        n = tokens.astype(np.float64)
        return float(self.prompt_token * n.sum() + self.prompt_context * (n * (starts + n / 2)).sum())

    def decode(self, rows: int, context: float, steps: int = 1) -> float:
        """Return the seconds of ``steps`` steps of ``rows`` rows, which have ``context`` tokens in all at first."""
        grown = rows * steps * (steps - 1) / 2
        return (self.step + self.decode_row * rows) * steps + self.decode_context * (context * steps + grown)

    def steps_until(self, rows: int, context: float, seconds: float) -> int:
        """Return the smallest number of decode steps that take at least ``seconds``, and at least 1."""
        a = self.decode_context * rows / 2
        b = self.step + self.decode_row * rows + self.decode_context * context - a
        root = 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds)) if seconds > 0 else 0.0
        return max(math.ceil(root - 1e-9), 1)


class Notice(NamedTuple):
    """What a router learns at ``time``: KV events, first tokens and ends, by the uids of requests."""

    time: float
    events: Sequence[AnyEvent]
    first_tokens: Sequence[int]
    finished: Sequence[Finished]


class _Engine(NullEngine):
    """Accepts every draft."""

    def result(self) -> StepResult:
        step = self._unread.popleft()
        accepted = step.num_sampled_tokens.astype(np.int32)
        return StepResult(step.id, np.full((step.rows, max(int(accepted.max()), 1)), TOKEN, np.int32), accepted)


class _Run(DraftProposer):
    """Drafts the tokens of the steps that a step stands for: ``steps`` less the token that a row computes anyway."""

    max_drafts = MAX_RUN

    def __init__(self) -> None:
        self.steps = 1

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = [TOKEN] * (self.steps - 1)
        return [drafts[:limit] for limit in limits]


class _Recorder:
    """Takes the place of the KV events plugin's Publisher: keeps the events of a turn."""

    replayer = None
    errors = messages = 0

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def publish(self, events: Sequence[AnyEvent]) -> None:
        self.events += events

    def close(self) -> None:
        pass


class SimReplica:
    """A replica with its own clock, ``now``, in seconds, which `advance` moves."""

    def __init__(
        self,
        spec: EngineSpec,
        cache: PrefixCache,
        policy: SchedulerPolicy,
        cost: StepCost,
        *,
        max_prefill_tokens: int = 8192,
        hash_seed: int = 0,
    ):
        self.now = 0.0
        self.cost = cost
        self.notices: deque[Notice] = deque()
        """What a router has not learned yet, in order of time."""
        self._recorder, self._run, self._engine = _Recorder(), _Run(), _Engine(spec, TOKEN)
        plugin = import_module("minisgl.plugins.observer.kv_events")
        observers = pluggy.PluginManager(hooks.PROJECT)
        observers.add_hookspecs(hooks)
        observers.register(plugin.KVEvents(spec, hash_seed, self._recorder))
        self.scheduler = Scheduler(
            self._engine,
            cache,
            StarvationGuard(policy, Config.starvation_steps),
            max_prefill_tokens=max_prefill_tokens,
            overlap=False,
            make_manager=make_manager,
            observer=HookObserver(observers.hook),
            clock=lambda: self.now,
            speculation=self._run.speculate(
                spec, lambda: self.now, max_draft_tokens=MAX_RUN * spec.max_running_requests, adapt=False
            ),
        )
        self._has_token: set[int] = set()  # uids of open requests with a token
        self._run_end = -math.inf  # when the run of equal steps that begins at `now` ends, if it is known

    def add(self, uid: int, prompt_ids: I32, output_tokens: int, now: float) -> None:
        """Add a request that arrives at time ``now``. A step that is under way ends first."""
        self.advance(now, cut=True)
        if not self.scheduler.has_work:
            self.now = max(self.now, now)
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0)
        self.scheduler.add_request(uid, prompt_ids, params)
        self._run_end = -math.inf

    def advance(self, until: float, cut: bool = False) -> None:
        """Compute the steps that begin before time ``until``.

        A run of equal steps that ends later is computed when its end is known: at the next `add`, which calls this
        method with ``cut``, or when it is over. Until then, it has no effect that a router could notice.
        """
        while self.now < until and self.scheduler.has_work:
            if self._run_end >= until and not cut:
                return
            steps, rows, context = self._equal_steps()
            if steps > 1:
                self._run_end = self.now + self.cost.decode(rows, context, steps)
                if self._run_end > until:
                    if not cut:
                        return
                    steps = min(self.cost.steps_until(rows, context, until - self.now), steps)
            self._step(steps)

    def learned(self, until: float) -> Iterator[Notice]:
        """Yield and forget the notices up to time ``until``."""
        while self.notices and self.notices[0].time <= until:
            yield self.notices.popleft()

    def _equal_steps(self) -> tuple[int, int, float]:
        """Return how many of the next steps are equal, but for the growth of the contexts; the rows; their contexts.

        That is 1 unless all requests decode, no request waits and there are pages for all these steps.
        """
        table = self.scheduler.request_table
        rows = table.decoding()
        context = float(table.num_computed_tokens[rows].sum() + len(rows))
        if self.scheduler.waiting or len(rows) < len(table.req_pool_indices) or not len(rows):
            return 1, len(rows), context
        steps = min(int((table.max_len[rows] - 1 - table.num_computed_tokens[rows]).min()), MAX_RUN)
        if int(table.page_growth(steps).sum()) > self.scheduler.cache_manager.num_available_pages:
            steps = 1
        return steps, len(rows), context

    def _step(self, steps: int) -> None:
        """Compute one step of the scheduler, which stands for ``steps`` equal steps."""
        self._run.steps, self._run_end, self._engine.last = steps, -math.inf, None
        output = self.scheduler.step()
        self.now += self._seconds(self._engine.last, steps)
        events, self._recorder.events = self._recorder.events, []
        first = [uid for uid in dict.fromkeys(output.uids) if uid not in self._has_token]
        self._has_token.update(first)
        self._has_token.difference_update(end.uid for end in output.finished)
        if events or first or output.finished:
            self.notices.append(Notice(self.now, events, first, output.finished))

    def _seconds(self, step: Step | None, steps: int) -> float:
        if step is None:
            return self.cost.step
        first_chunk = step.num_continuing
        context = float(step.num_computed_tokens[:first_chunk].sum() + first_chunk)
        assert steps == 1 or step.num_verify == step.rows == int((step.num_scheduled_tokens == steps).sum())
        return self.cost.decode(first_chunk, context, steps) + self.cost.prefill(
            step.num_computed_tokens[first_chunk:], step.num_scheduled_tokens[first_chunk:]
        )
