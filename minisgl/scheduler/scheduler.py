"""The scheduler: receives requests, sends Steps to the engine, and returns tokens. One per engine, in rank 0's process.

`Scheduler.step` is one turn of the loop; its docstring lists what a turn does. The scheduler knows nothing of models,
devices or text.

With overlap scheduling, the host prepares step N + 1 while the device computes step N. So a request may end, or be
retracted, while a step with a row of that request is in flight. The token that this row samples is discarded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from minisgl.core import I32, INTERRUPTED, Engine, EngineDeadError, Finished, Output, Req, SamplingParams, Step
from minisgl.scheduler.base import Running, SchedulerPolicy
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.observer import Observer
from minisgl.scheduler.planner import Planner, req_pool_indices_of
from minisgl.scheduler.steps import NO_TOKEN, Counters, Ended, InFlightStep, ResultReader, StepBuilder
from minisgl.scheduler.waiting_queue import NO_GROUP, WaitingQueue, check_request, seed_of


class Scheduler:
    """Continuous batching on one engine (Orca, OSDI 2022), with KV in pages (PagedAttention, arXiv:2309.06180).

    The loop of a user: ``add_request(…)``, then ``while scheduler.has_work: output = scheduler.step()``.

    - ``cache``, ``policy``: what the groups `cache` and `scheduler` build. A policy may starve requests, unless a
      `StarvationGuard` wraps it.
    - ``max_prefill_tokens``: maximum number of tokens in all prefill chunks of one step together.
    - ``overlap``: whether the host prepares a step while the device computes the step before.
    - ``eos_ids``: token ids that end a request, unless its ``ignore_eos`` is set.
    - ``seed``: the seeds of requests without a seed are derived from it.
    - ``observer``: is told of the scheduler's events; None: no object is. `HookObserver` calls the plugins' hooks.
    - ``clock``: returns the time in seconds that the observer receives.
    - ``speculation``: drafts tokens of decoding requests, which a step then verifies; None for no drafts. Its class is
      `minisgl.plugins.speculation.Speculation`.
    - ``constraint_of``: returns the constraint of a new request, such as a grammar, or None if it has none.
    - ``make_manager``: makes what moves the pages, from ``engine.spec``, ``cache`` and the observer, unless the cache
      has a method of this name. None: no KV is reused.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Any,
        policy: SchedulerPolicy,
        *,
        max_prefill_tokens: int = 8192,
        overlap: bool = True,
        eos_ids: Iterable[int] = (),
        seed: int = 0,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        speculation: Any = None,
        constraint_of: Callable[[Req], Any] | None = None,
        make_manager: Callable[..., CacheManager] | None = None,
    ):
        self.engine, self.spec, self.clock, self.constraint_of = engine, engine.spec, clock, constraint_of
        self.overlap_depth = 1 if overlap else 0
        self.eos_ids, self.seed = frozenset(eos_ids), seed
        self.events = observer or Observer()
        make = getattr(cache, "make_manager", make_manager)
        self.cache_manager = make(self.spec, cache, self.events) if make else CacheManager(self.spec, self.events)
        self.planner = Planner(self, policy, self.cache_manager, max_prefill_tokens)
        self.request_table = self.cache_manager.request_table
        self.speculation = speculation
        self.constraints: Any = None  # from the first request with a constraint on: `plugins/constraint/manager.py`
        self.step_builder = StepBuilder(self.cache_manager, speculation)
        self.counters = Counters()
        self.results = ResultReader(self.request_table, self.counters, speculation)
        self.requests: dict[int, Req] = {}  # open requests (waiting and running) by uid
        make_queue = getattr(policy, "make_queue", None)
        self.waiting = WaitingQueue() if make_queue is None else make_queue(lambda: self.request_table.reqs)
        self.in_flight: deque[InFlightStep] = deque()
        self.next_step_id = 0
        self._arrivals = self._admissions = 0
        self._output = Output()
        self._idle = True  # whether the pool was checked after the last request ended
        self._failure = ""  # why the scheduler can't go on: see `fail`

    # ---- requests ------------------------------------------------------------------------------------

    def add_request(
        self, uid: int, prompt_ids: Sequence[int] | I32, params: SamplingParams, group: int = NO_GROUP
    ) -> None:
        """Add a request to the waiting queue.

        Requests with the same ``group`` share what one request without a group has: `plugins/scheduler/guard.py`.

        Raise `InvalidRequestError`, which names the field, if the request can never be served (promise 2). Raise
        ValueError if ``uid`` is not an integer from 0 to 2^31 - 1, or if a request with this ``uid`` is open. The
        request is not registered then.
        """
        self._check_alive()
        ids = check_request(self.spec, uid, prompt_ids, params, self.planner.uses_priority)
        if uid in self.requests:
            raise ValueError(f"a request with uid {uid} is already open")
        req = Req(uid, ids, params, self._arrivals, seed_of(params, self.seed, self._arrivals))
        req.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        req.queued_at_step, req.group = self.next_step_id, group
        if self.constraint_of is not None:
            req.constraint = self.constraint_of(req)
        self._arrivals += 1
        self.requests[uid] = req
        if req.constraint is None:
            self.waiting.add(req)
        else:  # it enters the queue in `step`, when its constraint is ready
            self.constraints = self.constraints or req.constraint.make_manager(self.spec.vocab_size)
            self.constraints.add(req)
        self._idle = False
        self.events.request_added(req, self.clock())

    def abort_request(self, uid: int) -> None:
        """End a waiting or running request. Ignore an unknown ``uid``: the request may have ended already."""
        if uid in self.requests:
            self._finish([(self.requests[uid], "abort")])

    def fail(self, message: str) -> Output:
        """End every open request with an error, because the engine failed. Return all pending output.

        The failed engine may still write to pages that are in use, so no page is freed. From now on `add_request` and
        `step` raise `EngineDeadError` with this message.
        """
        self._failure = self._failure or message
        for req in list(self.requests.values()):
            self._reply(req, Finished(req.uid, "error", error=message))
        self.waiting.clear()
        self.in_flight.clear()
        return self._pop_output()

    def _check_alive(self) -> None:
        if self._failure:
            raise EngineDeadError(self._failure)

    @property
    def has_work(self) -> bool:
        """Whether requests are open, steps are in flight, or output is pending."""
        return bool(self.requests or self.in_flight or self._output)

    # ---- the loop ------------------------------------------------------------------------------------

    def step(self) -> Output:
        """Run one turn of the loop: launch at most one step, and return new tokens and finished requests.

        A turn does the following, in this order:

        1. Ensure a free or evictable KV page for every decode row that needs a new one. If pages run out, wait for
           retiring pages, and then retract (vLLM: preempt) the youngest request, or the one that the policy names:
           `_ensure_decode_pages`, `_retract`.
        2. Schedule: the policy chooses rows among the running and the waiting requests: `_plan`, `Planner.plan`. The
           plan must fit into the step's tokens, rows and pages: `Planner.check`.
        3. Admit the waiting requests in the plan: lock their cached prefixes, allocate their KV pages, and evict cached
           pages if too few are free: `_admit`, `CacheManager.admit`.
        4. Allocate a KV page for each decode row whose last page is full: `CacheManager.allocate_step_pages`.
        5. Build the Step and launch it, without waiting for the device: `_build`, `Engine.launch`.
        6. Insert into the prefix cache the prompt pages that the launched step computes: `_record_launch`,
           `CacheManager.step_launched`.
        7. Read the result of the step *before*, while the device computes the step just launched (overlap scheduling).
           Without overlap, or if there was nothing to launch, read the oldest result: `_process_result`. If a row has a
           grammar, the sampling of the step just launched starts only now, with masks that depend on the result just
           read: `plugins/constraint`. If the step before verifies drafts, its result is read first of all, before 1.
        8. With that result, free the retired pages that waited for its step: `CacheManager.free_retired`. Append the
           sampled tokens. Finish requests that sampled a stop token or reached ``max_tokens``, and release their pages:
           `_finish`, `CacheManager.release`.
        """
        self.read_verification()
        if self.constraints is not None:
            is_idle = not (self.waiting or self.request_table.reqs or self.in_flight)
            for req in self.constraints.pop_ready(is_idle):
                req.queued_at_step = self.next_step_id
                self.waiting.add(req)
        launched = self._launch()  # 1 to 6
        while len(self.in_flight) > 1:
            self._process_result()  # 7 and 8
        if launched and self.constraints is not None and self.in_flight[-1].step.late_sampling:
            # All results of earlier steps have been read, so the grammars know every token before those to be sampled.
            masks, ended = self.constraints.masks(self.in_flight[-1])
            self.engine.sample(masks)
            self._finish(ended)
        if self.in_flight and not (launched and self.overlap_depth):
            self._process_result()
        self.events.pages_counted(self.next_step_id, *self.cache_manager.page_counts())
        if not self.requests and not self.in_flight and not self._idle:
            self._idle = True
            self.cache_manager.check_idle()
        return self._pop_output()

    def read_verification(self) -> None:
        """Wait for the result of the step in flight if it verifies drafts; `step` returns the new tokens.

        `step` calls it, because only the result says how many draft tokens were accepted, so where the next rows begin.
        A loop that calls it before it adds the requests that have arrived lets them take part in the next step. Else a
        request that arrives during the wait would also wait for the whole next step.
        """
        self._check_alive()
        while self.in_flight and self.in_flight[-1].step.num_verify:
            self._process_result()

    def _pop_output(self) -> Output:
        out, self._output = self._output, Output([], [], [], {}, {})
        return out

    def _launch(self) -> bool:
        """Schedule, build and launch one step. Return False if there is nothing to launch."""
        self._ensure_decode_pages()
        views = self.request_table.running_views(self.next_step_id)
        if not views and not self.waiting:
            return False
        rows = self._plan(views)
        if not rows:
            return False
        step, reqs = self._build(rows)
        self.events.batch_scheduled(step, reqs, self.clock())
        self.engine.launch(step)
        self._record_launch(step, reqs)
        return True

    def _plan(self, views: list[Running]) -> Sequence[tuple[int, int]]:
        """Return the rows of the next step, (uid, tokens) each, after the retractions that the policy plans.

        ``views`` are the running requests. The result is empty only if a step is in flight, or if no request can
        compute anything.
        """
        if in_the_way := self.planner.make_room():
            self._retract(in_the_way)
            views = self.request_table.running_views(self.next_step_id)
        plan = self.planner.plan(views)
        rows = plan.rows
        if plan.retract:
            self._retract([self.requests[uid] for uid in plan.retract])
            rows = self.planner.grant_again(rows)
        if not rows and not self.in_flight:
            # No result is due that could free pages, so another turn would be the same: compute the oldest request.
            rows = self.planner.oldest_row()
        return rows

    def _ensure_decode_pages(self) -> None:
        """Ensure a free or evictable page for every decode row whose next token needs a new page.

        While there are too few pages, read the result of a step in flight if that frees pages; otherwise retract the
        first of `Planner.victims`: the youngest running request, unless the policy uses priorities or another order.
        """
        table, cache_manager = self.request_table, self.cache_manager
        while table.new_pages(table.decoding()).sum() > cache_manager.num_available_pages:
            if self.in_flight and cache_manager.has_pending_frees:
                self._process_result()
                continue
            cache_manager.reserve.pages_ran_out()
            victims = self.planner.victims()
            assert len(victims) > 1, "the KV pool cannot hold the only running request"
            self._retract(victims[:1])

    def _retract(self, reqs: Sequence[Req]) -> None:
        """Release row and pages of running requests and return them to the waiting queue (vLLM: preempt).

        A request keeps its output. When it is admitted again, it prefills prompt and output, and then continues.
        """
        self._release(reqs)
        self.counters["retractions"] += len(reqs)
        for req in reqs:
            req.queued_at_step = self.next_step_id
            self.waiting.add(req)
            self.events.request_retracted(req, self.next_step_id)

    def _release(self, reqs: Sequence[Req]) -> None:
        if self.speculation is not None:
            self.speculation.removed(reqs)
        self.cache_manager.release(reqs)

    # ---- building and launching a step -----------------------------------------------------------------

    def _build(self, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        """Check the planned rows (uid, tokens), admit their waiting requests, allocate pages and build the step.

        Return the step and the request of each row.
        """
        reqs, req_pool_indices, num_tokens = self.planner.check(rows)
        self.events.batch_planned(self.next_step_id, rows)
        admitted = [reqs[i] for i in np.flatnonzero(req_pool_indices < 0).tolist()]
        if admitted:
            self._admit(admitted)
            req_pool_indices = req_pool_indices_of(reqs)
        return self.step_builder.build(
            self.next_step_id, reqs, req_pool_indices, num_tokens, admitted, may_repeat=not self.waiting
        )

    def _admit(self, reqs: list[Req]) -> None:
        """Move waiting requests to the running ones: lock their cached prefixes and allocate their rows and pages."""
        for req in reqs:
            req.admission_order = self._admissions
            self._admissions += 1
        self.cache_manager.admit(reqs, self.next_step_id)
        if self.speculation is not None:
            self.speculation.admitted(reqs)
        for req in reqs:
            self.waiting.remove(req)
            num_cached_tokens = int(self.request_table.num_computed_tokens[req.req_pool_idx])
            self.counters.admitted(req, num_cached_tokens)
            if req.first_admission:
                req.num_cached_tokens, req.first_admission = num_cached_tokens, False

    def _record_launch(self, step: Step, reqs: list[Req]) -> None:
        """Record a launched step as in flight, and insert into the cache the prompt pages that it computes."""
        table = self.request_table
        launched = InFlightStep(step, reqs, table.admission_order[step.req_pool_indices])
        table.num_computed_tokens[step.req_pool_indices] = launched.certain_ends
        table.last_step[step.req_pool_indices] = step.id
        self.in_flight.append(launched)
        self.next_step_id += 1
        self.cache_manager.step_launched(step, reqs[step.num_continuing :])
        self.counters.launched(step)

    # ---- the result --------------------------------------------------------------------------------------

    def _process_result(self) -> None:
        """Read the result of the oldest step in flight: free retired pages, append tokens, finish requests."""
        result = self.engine.result()
        launched = self.in_flight.popleft()
        step = launched.step
        assert result.id == step.id, f"expected the result of step {step.id}, the engine returned step {result.id}"
        self.cache_manager.free_retired(step.id)
        if step.late_sampling and self.constraints is not None:
            gained, ended = self.constraints.append(self.results, launched, result, self._output)
        else:
            gained, ended = self.results.append(launched, result, self._output)
        if self.speculation is not None:
            self.speculation.read(launched, result, np.flatnonzero(gained).tolist())
        self.events.step_finished(result, launched.reqs_of(gained), self.clock())
        if ended:
            self._finish(ended)

    def _finish(self, ended: Ended) -> None:
        """End running or waiting requests: release their rows and pages, if any, and send their final replies."""
        running = [req for req, _ in ended if req.req_pool_idx >= 0]
        for req, reason in ended:
            req.finish_reason = reason
            if req in self.waiting:
                self.waiting.remove(req)
        if running:
            self._release(running)
        for req, reason in ended:
            if reason != "abort":
                self.cache_manager.reserve.answer_ended(len(req.output_ids))
            stop_id = req.output_ids[-1] if reason == "stop" else None
            self._reply(req, Finished(req.uid, reason, stop_id=stop_id, error=NO_TOKEN if reason == "error" else ""))

    def _reply(self, req: Req, end: Finished) -> None:
        """Send the request's final reply, exactly one per request (promise 1)."""
        end.prompt_tokens, end.output_tokens = len(req.prompt_ids), len(req.output_ids)
        end.cached_tokens = req.num_cached_tokens
        req.finish_reason, req.error = end.finish_reason, end.error
        del self.requests[req.uid]
        req.constraint = None
        self._output.finished.append(end)
        self.counters[f"finished_{end.finish_reason}"] += 1
        self.events.request_finished(req, self.clock())

    # ---- counters and checks ---------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Return counters since the start and, with names that begin with ``num_``, current numbers."""
        return {
            **self.counters,
            **({} if self.speculation is None else self.speculation.stats()),
            **self.cache_manager.stats(),
            "num_waiting_reqs": sum(req.req_pool_idx < 0 for req in self.requests.values()),
            "num_running_reqs": len(self.request_table.reqs),
            "num_in_flight_steps": len(self.in_flight),
        }

    def close(self) -> None:
        """End the open requests with the error `INTERRUPTED`, and free what drafts hold. Call nothing after it."""
        self.fail(INTERRUPTED)
        if self.speculation is not None:
            self.speculation.close()
