"""What if: the rest of a recorded run with other options, from any step on.

The real scheduler repeats the run up to that step. Instead of a model, an engine answers with the tokens that the run
sampled: they do not depend on the batch (promise 8). So the scheduler is in the very state in which the run was. Then
it gets the other options and goes on.

The run is repeated a second time with its own options to the end. Both repetitions have the same clock: each step takes
the time that `minisgl.trace.step_times` estimates, and each request arrives as long after the step before as it did. So
equal schedules take equal times, and a difference comes from the options, not from a busy machine.

A trace does not say which requests had a grammar, and what the drafts of a proposer depended on. If such a thing
mattered, the repetition differs from the record: `Future.misses` says where.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import pluggy

from minisgl import hooks
from minisgl.config import Config
from minisgl.core import EngineSpec, SamplingParams, Step, StepResult, TokenMasks
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.observer import EVENTS, HookObserver
from minisgl.scheduler.request_table import FIRST_LENGTH
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.waiting_queue import WaitingQueue
from minisgl.trace import events as ev
from minisgl.trace.read import Trace, TraceError
from minisgl.trace.record import EventMaker
from minisgl.trace.recorded import Recorded, options_of, requests_of
from minisgl.trace.step_times import StepTimes, fit

__all__ = ["Future", "what_if"]

IN_PLACE = ("scheduler", "max_prefill_tokens", "overlap", "starvation_steps")
"""Options that a scheduler can change while it runs. All others begin with an empty pool: open requests run again."""
LAST_UID = 2**31 - 1
"""The uid of the requests that fill the cache of a record that begins later than its run."""
SIZES = ("page_size", "num_pages", "max_running_requests", "max_seq_len")


@dataclass
class Future:
    """How a run went on.

    ``events`` are those of the whole run, with the repeated steps before ``at``. ``restarted``: an option needed an
    empty pool, and ``events`` begin anew at ``at``. ``departs`` is the first step that was launched with other rows
    than in the record, or None. ``misses`` is the first step before ``at`` at which the repetition differs, or None.
    ``was`` are the events of the whole run with its own options, on the same clock, and ``times`` is that clock.
    ``same`` are the overrides that the run had itself: they change nothing.
    """

    spec: EngineSpec
    at: int
    events: list[ev.Line]
    restarted: bool = False
    departs: int | None = None
    misses: int | None = None
    was: list[ev.Line] = field(default_factory=list)
    times: StepTimes | None = None
    same: list[str] = field(default_factory=list)


def what_if(trace: Trace, at: int, overrides: Sequence[str] = (), held: Collection[int] = ()) -> Future:
    """Repeat a run up to step ``at``, and go on with ``overrides``, such as ``scheduler=mixed``.

    ``held`` are the steps before which the server waited on purpose. Raise `TraceError` if the trace does not hold what
    this needs, and `ConfigError` for a wrong override.
    """
    times = fit(trace, held)
    other = _Replay(trace, at, overrides, times)  # says what is wrong before the long work
    was = _Replay(trace, at, (), times)
    was.run()
    other.arrivals, other.aborts = was.arrivals, was.aborts
    future = other.run()
    departs = was.future.departs
    if was.future.misses is None and departs is not None and departs < was.end:
        future.misses = departs  # the record itself can't be repeated
    if departs is not None and departs >= was.end and departs == future.departs:
        future.departs = None  # both go on where the record ends
    future.was, future.times, future.same = was.future.events, times, other.same
    return future


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Engine:
    """An engine that answers with the recorded tokens. The last one of a request that ended by itself is a stop id."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, spec: EngineSpec, recorded: dict[int, Recorded], replay: _Replay):
        self.spec, self._recorded, self._replay = spec, recorded, replay
        self.stop_id = spec.vocab_size
        self._uids: dict[int, int] = {}
        self._results: deque[StepResult] = deque()

    def launch(self, step: Step) -> None:
        for admission in step.admissions:
            self._uids[admission.req_pool_idx] = admission.uid
        tokens = np.zeros((step.rows, 1), np.int32)
        for i in np.flatnonzero(step.num_sampled_tokens).tolist():
            uid = self._uids[int(step.req_pool_indices[i])]
            end = int(step.num_computed_tokens[i] + step.num_scheduled_tokens[i])
            tokens[i, 0] = self._token(self._recorded[uid], end) if uid != LAST_UID else 0
        self._results.append(StepResult(step.id, tokens, step.num_sampled_tokens.copy()))
        self._replay.launched(step)

    def _token(self, recorded: Recorded, position: int) -> int:
        index = position - len(recorded.added.prompt_ids)
        if index >= len(recorded.output):
            return 0
        ends = index == len(recorded.output) - 1 and recorded.end is not None and recorded.end.finish_reason == "stop"
        return self.stop_id if ends else recorded.output[index]

    def sample(self, masks: TokenMasks) -> None:
        raise TraceError("A step waits for masks of a grammar, which a trace does not have.")

    def result(self) -> StepResult:
        result = self._results.popleft()
        self._replay.finished(result.id)
        return result

    def close(self) -> None:
        """Release nothing."""


class _Replay:
    """One repetition. Without ``overrides``, it notes when requests arrive, and when their clients give them up."""

    def __init__(self, trace: Trace, at: int, overrides: Sequence[str], times: StepTimes):
        self.trace, self.at, self.times = trace, at, times
        if trace.header.hidden_tokens:
            raise TraceError(f"{trace.name} has no token ids, so the cache can't be repeated (live.text, trace=FILE).")
        start = trace.events[0] if trace.events and isinstance(trace.events[0], ev.Now) else None
        if start is not None and (start.requests or start.in_flight):
            raise TraceError(
                f"{trace.name} begins in step {start.step}, while {len(start.requests)} requests were open."
            )
        first = 0 if start is None else start.step
        self.recorded = requests_of(trace, first)
        self.batches = {event.step: event for event in trace if isinstance(event, ev.Batch)}
        self.end = first + len(self.batches)
        if not first <= at <= self.end:
            raise TraceError(f"--at {at}: {trace.name} has the steps {first} to {self.end - 1}.")
        before = takewhile(lambda event: not (isinstance(event, ev.Batch) and event.step == at), trace)
        self._read_before_at = first + sum(isinstance(event, ev.Done) for event in before)
        self.clock = _Clock()
        self.manager = PluginManager.load(light=True)  # the scheduler needs no torch
        self.config = compose(self.manager, options_of(trace))
        chosen = {word.partition("=")[0] for word in overrides}
        self.new_config = compose(self.manager, [*options_of(trace, chosen), *overrides])
        self.same = [word for word in overrides if self._is_same(_option(word))]
        self.overrides = [word for word in overrides if word not in self.same]
        self.is_original = not overrides
        self.arrivals: dict[int, float] = {}  # uid -> time, in the repetition with the options of the record
        self.aborts: dict[int, float] = {}
        self._idle_before = _idle_before(trace)
        self.future = Future(trace.spec, at, [])
        self._waiting = sorted(self.recorded.values(), key=lambda each: each.place)
        self._open: dict[int, Recorded] = {}
        self._num_read = first
        self._ends: dict[int, float] = {}  # launched step -> the time at which its result is there
        self._last_end = 0.0
        self._base = 0  # number of the step with which the present scheduler began
        self.scheduler = self._build(self.config, trace.spec)
        if start is not None:
            self._fill_cache(start)

    def _is_same(self, name: str) -> bool:
        old = getattr(self.trace.spec, name) if name in SIZES else getattr(self.config, name, None)
        return bool(old == getattr(self.new_config, name, None))

    def _fill_cache(self, start: ev.Now) -> None:
        """Give the cache the prefixes that it had when the record began: a request computes each, in order of use.

        The numbers of the pages differ from the record's, and the order of their eviction may.
        """
        name, tokens, size = self.trace.name, dict(start.tokens), self.trace.spec.page_size
        paths: list[list[int]] = []
        for parent, pages, _, _ in start.tree:
            if not tokens.keys() >= set(pages):
                raise TraceError(f"{name} begins in step {start.step}, and lacks the tokens of cached pages.")
            ids = [token for page in pages for token in tokens[page]]
            paths.append([*(paths[parent] if parent >= 0 else ()), *ids])
        most = (self.trace.spec.max_seq_len - 1) // size * size
        for i in sorted(range(len(paths)), key=lambda i: start.tree[i][3]):
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            self.scheduler.add_request(LAST_UID, paths[i][:most], params)
            while self.scheduler.has_work:
                self.scheduler.step()
        self.future.events.clear()
        self._ends.clear()
        self._last_end = self.clock.now = 0.0
        self.future.departs = self.future.misses = None
        self.scheduler.next_step_id = self._maker.next_step = start.step
        manager = self.scheduler.cache_manager
        manager.last_launched_step = start.step - 1
        manager.free_retired(start.step - 1)
        manager.reserve.mean_length = start.mean_length or FIRST_LENGTH
        self._num_read = start.step

    def _build(self, config: Config, spec: EngineSpec) -> Scheduler:
        self.engine = _Engine(spec, self.recorded, self)
        scheduler = build_scheduler(config, self.manager, self.engine, self.clock)
        hooked = pluggy.PluginManager(hooks.PROJECT)
        hooked.add_hookspecs(hooks)
        self._maker = EventMaker(self._take)
        hooked.register(self._maker)
        observer = HookObserver(hooked.hook)
        for name in EVENTS:  # the parts of the scheduler share one observer
            setattr(scheduler.events, name, getattr(observer, name))
        return scheduler

    # ---- events --------------------------------------------------------------------------------------

    @property
    def _follows(self) -> bool:
        """Whether all steps so far have been those of the record."""
        return self.future.departs is None and self.future.misses is None

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, ev.Batch):
            self._launched(event)
        elif isinstance(event, ev.Done):
            self._num_read += 1
        self.future.events.append(event)  # type: ignore[arg-type]

    def _launched(self, batch: ev.Batch) -> None:
        step = self._base + batch.step
        same = self.batches.get(step)
        if self._follows and (same is None or _rows(same) != _rows(batch)):
            if step < self.at:
                self.future.misses = step
            else:
                self.future.departs = step

    def launched(self, step: Step) -> None:
        """Note when the result of a step will be there. On a CPU, the launch takes that long."""
        start = self.clock.now if self.times.synchronous else max(self.clock.now, self._last_end)
        self._ends[step.id] = self._last_end = start + self.times.of(step)
        if self.times.synchronous:
            self.clock.now = self._last_end

    def finished(self, step: int) -> None:
        """Go on to the time at which the result of a step is there."""
        self.clock.now = max(self.clock.now, self._ends[step])

    # ---- the loop ------------------------------------------------------------------------------------

    def run(self) -> Future:
        changed = False
        for _ in range(20 * len(self.batches) + 100_000):
            self._deliver()
            launched = self.scheduler.next_step_id
            if not changed and (launched > self.at or (launched == self.at and self._num_read >= self._read_before_at)):
                self._change()
                changed = True
            if self.scheduler.has_work:
                self.clock.now += self.times.host
                self.scheduler.step()
            elif self._waiting:
                self._add(self._waiting.pop(0))
            else:
                break
        else:
            raise TraceError("the run with the other options does not end: its steps are too small.")
        if self._follows and self.end > self._base + self.scheduler.next_step_id:
            self.future.departs = self._base + self.scheduler.next_step_id
        return self.future

    def _deliver(self) -> None:
        """Add the requests that have arrived, and abort those whose client gave up, in the recorded order."""
        counts = self._base + self.scheduler.next_step_id, self._num_read
        while True:
            added = self._waiting[0] if self._waiting and self._is_due(self._waiting[0], counts) else None
            given_up = (each for each in self._open.values() if self._is_given_up(each, counts))
            gone = min(given_up, key=lambda each: each.end_place, default=None)
            if gone is not None and (added is None or gone.end_place < added.place):
                del self._open[gone.added.uid]
                if self.is_original:
                    self.aborts[gone.added.uid] = self.clock.now
                self.scheduler.abort_request(gone.added.uid)
            elif added is not None:
                self._add(self._waiting.pop(0))
            else:
                return

    def _is_due(self, each: Recorded, counts: tuple[int, int]) -> bool:
        if self._follows or self.is_original:
            return each.before[0] <= counts[0] and each.before[1] <= counts[1]
        return self.arrivals[each.added.uid] <= self.clock.now

    def _is_given_up(self, each: Recorded, counts: tuple[int, int]) -> bool:
        """Whether a client gave a request up: at the recorded moment, and later with as many tokens as it then had."""
        if not each.is_aborted or each.added.uid not in self.scheduler.requests:
            return False
        if self._follows and each.end is not None:
            return each.end_before[0] <= counts[0] and each.end_before[1] <= counts[1]
        gained = len(self.scheduler.requests[each.added.uid].output_ids)
        if each.output or each.end is None:
            return gained >= max(len(each.output), 1)
        return self.aborts.get(each.added.uid, 0.0) <= self.clock.now

    def _add(self, each: Recorded) -> None:
        added = each.added
        if self._follows or self.is_original:
            if not self.scheduler.has_work:
                self.clock.now += self._idle_before.get(added.uid, 0.0)
            if self.is_original:
                self.arrivals[added.uid] = self.clock.now
        else:
            self.clock.now = max(self.clock.now, self.arrivals[added.uid])
        params = SamplingParams(
            max_tokens=added.max_tokens, ignore_eos=True, cache_salt=added.cache_salt, priority=added.priority
        )
        spec, most = self.future.spec, len(added.prompt_ids) + added.max_tokens
        if most > spec.num_pages * spec.page_size:
            raise TraceError(
                f"A KV pool of {spec.num_pages} pages of {spec.page_size} tokens is too small: request {added.uid} may "
                f"have {most} tokens, and so needs {-(-most // spec.page_size)} pages alone. Choose a larger pool."
            )
        self.scheduler.add_request(added.uid, added.prompt_ids, params, added.group)
        self.scheduler.requests[added.uid].stop_ids = frozenset((self.engine.stop_id,))
        self._open[added.uid] = each

    # ---- other options ---------------------------------------------------------------------------------

    def _change(self) -> None:
        if not self.overrides:
            return
        names = {_option(word) for word in self.overrides}
        if names <= set(IN_PLACE):
            config, scheduler = self.new_config, self.scheduler
            scheduler.planner.max_prefill_tokens = config.max_prefill_tokens
            scheduler.overlap_depth = 1 if config.overlap else 0
            if names & {"scheduler", "starvation_steps"}:
                self._change_policy(config, scheduler)
            return
        old, spec = self.scheduler, self.trace.spec
        sizes = {name: getattr(self.new_config, name) for name in SIZES if name in names}
        self._base = old.next_step_id
        spec = replace(spec, **sizes)
        self.future.spec, self.future.restarted, self.future.departs = spec, True, self.at
        self.future.events.clear()
        self._ends.clear()
        self.scheduler = self._build(self.new_config, spec)
        for req in list(old.requests.values()):
            self._add(self._open[req.uid])
            self.scheduler.requests[req.uid].output_ids = list(req.output_ids)

    def _change_policy(self, config: Config, scheduler: Scheduler) -> None:
        """Give the scheduler the policy of ``config``, with the guard around it, and a queue of that policy."""
        policy = self.manager.build("scheduler", config.scheduler)
        for wrap in reversed(self.manager.hook.minisgl_wrap_policy(config=config)):
            policy = wrap(policy)
        waiting = [req for req in scheduler.requests.values() if req.req_pool_idx < 0]
        make_queue = getattr(policy, "make_queue", None)
        scheduler.waiting = WaitingQueue() if make_queue is None else make_queue(lambda: scheduler.request_table.reqs)
        for req in waiting:
            scheduler.waiting.add(req)
        scheduler.planner.policy = policy
        scheduler.planner.uses_priority = getattr(policy, "uses_priority", False)


def _option(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition(".")[0]


def _idle_before(trace: Trace) -> dict[int, float]:
    """Return for each request the seconds from the last step's launch or result to its arrival."""
    found, last = dict[int, float](), None
    for event in trace:
        if isinstance(event, ev.Batch | ev.Done):
            last = event.t
        elif isinstance(event, ev.Add) and last is not None:
            found[event.uid] = max(event.t - last, 0.0)
    return found


def _rows(batch: ev.Batch) -> list[tuple[int, int, int]]:
    return list(zip(batch.uids, batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True))
