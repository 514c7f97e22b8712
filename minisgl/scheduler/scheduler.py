"""The scheduler: receives requests, sends Steps to the engine, and returns tokens. One per engine, in rank 0's process.

`Scheduler.step` is one turn of the loop; its docstring lists what a turn does. The scheduler knows nothing of models,
devices or text.

With overlap scheduling, the host prepares step N + 1 while the device computes step N. So a request may end, or be
retracted, while a step with a row of that request is in flight. The token that this row samples is discarded.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from minisgl.core import (
    I32,
    PENDING,
    Admission,
    Bools,
    Engine,
    Finished,
    FinishReason,
    InvalidRequestError,
    Output,
    Req,
    SamplingParams,
    Step,
    StepResult,
)
from minisgl.kvcache import PrefixCache
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.events import Events
from minisgl.scheduler.planner import Planner, PolicyError, req_pool_indices_of


class InFlightStep(NamedTuple):
    """A launched step whose result has not been read. All arrays are ``[rows]``."""

    id: int
    reqs: list[Req]
    req_pool_indices: I32
    admission_orders: I32  # the admission that the row belongs to; a later admission may reuse the request-pool row
    ends: I32  # the request's computed positions after this step
    sample: Bools  # whether the row samples a token


class Scheduler:
    """Continuous batching on one engine (Orca, OSDI 2022), with KV in pages (PagedAttention, arXiv:2309.06180).

    The loop of a user: ``add_request(…)``, then ``while scheduler.has_work: output = scheduler.step()``.

    - ``cache``, ``policy``: the prefix cache and the scheduling policy.
    - ``max_prefill_tokens``: maximum number of tokens in all prefill chunks of one step together.
    - ``overlap``: whether the host prepares a step while the device computes the step before.
    - ``starvation_steps``: steps without a row after which a request is scheduled without the policy, if it fits.
    - ``eos_ids``: token ids that end a request, unless its ``ignore_eos`` is set.
    - ``seed``: the seeds of requests without a seed are derived from it.
    - ``observers``: the plugin manager's ``hook``, or None for no observers.
    - ``clock``: returns the time in seconds that observers receive.
    """

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        policy: SchedulerPolicy,
        *,
        max_prefill_tokens: int = 8192,
        overlap: bool = True,
        starvation_steps: int = 512,
        eos_ids: Iterable[int] = (),
        seed: int = 0,
        observers: Any | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.engine, self.clock = engine, clock
        self.spec = engine.spec
        self.overlap_depth = 1 if overlap else 0
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self.events = Events(observers)
        self.cache_manager = CacheManager(self.spec, cache, self.events)
        self.planner = Planner(self, policy, self.cache_manager, max_prefill_tokens, starvation_steps)
        self.request_table = self.cache_manager.request_table
        self.requests: dict[int, Req] = {}  # open requests (waiting and running) by uid
        self.waiting: list[Req] = []  # in order of arrival
        self.in_flight: deque[InFlightStep] = deque()
        self.next_step_id = 0
        self._arrivals = 0
        self._admissions = 0
        self._output = Output()
        self._idle = True  # whether the pool was checked after the last request ended
        self._counts = dict.fromkeys(_COUNTERS, 0)

    # ---- requests ------------------------------------------------------------------------------------

    def add_request(self, uid: int, prompt_ids: Sequence[int] | I32, params: SamplingParams) -> None:
        """Add a request to the waiting queue.

        Raise `InvalidRequestError`, which names the field, if the request can never be served (promise 2). Raise
        ValueError if a request with this ``uid`` is open.
        """
        spec = self.spec
        ids = np.asarray(prompt_ids, np.int64)
        if len(ids) == 0:
            raise InvalidRequestError("prompt", "The prompt is empty. It must have at least one token.")
        if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
            invalid = int(ids[(ids < 0) | (ids >= spec.vocab_size)][0])
            raise InvalidRequestError(
                "prompt", f"Token id {invalid} is not in the vocabulary, which has {spec.vocab_size} tokens."
            )
        params.check(spec.vocab_size)
        limit = min(spec.max_seq_len, spec.num_pages * spec.page_size + 1)  # the last token's KV is never stored
        if len(ids) + params.max_tokens > limit:
            limited_by = "the model's context" if limit == spec.max_seq_len else "the KV pool"
            raise InvalidRequestError(
                "prompt" if len(ids) >= limit else "max_tokens",
                f"The prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}. Together they exceed the "
                f"{limit} tokens that {limited_by} can hold.",
                "context_length_exceeded",
            )
        if uid in self.requests:
            raise ValueError(f"a request with uid {uid} is already open")
        req = Req(uid, ids.astype(np.int32), params, self._arrivals, self._seed_of(params))
        req.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        req.queued_at_step = self.next_step_id
        self._arrivals += 1
        self.requests[uid] = req
        self.waiting.append(req)
        self._idle = False
        self.events.request_added(req, self.clock())

    def _seed_of(self, params: SamplingParams) -> int:
        """Return the seed in ``params``, or a seed derived from the arrival number (splitmix64)."""
        if params.seed is not None:
            return params.seed
        x = (self.seed * 0x9E3779B97F4A7C15 + (self._arrivals + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0x94D049BB133111EB) & (2**64 - 1)
        return (x ^ (x >> 31)) >> 1

    def abort_request(self, uid: int) -> None:
        """End a waiting or running request. Ignore an unknown ``uid``: the request may have ended already."""
        if uid in self.requests:
            self._finish(self.requests[uid], "abort")

    def fail(self, message: str) -> Output:
        """End every open request with an error, because the engine failed. Return all pending output."""
        for req in list(self.requests.values()):
            self._reply(req, Finished(req.uid, "error", error=message))
        self.waiting.clear()
        self.in_flight.clear()
        return self._pop_output()

    @property
    def has_work(self) -> bool:
        """Whether requests are open, steps are in flight, or output is pending."""
        return bool(self.requests or self.in_flight or self._output)

    # ---- the loop ------------------------------------------------------------------------------------

    def step(self) -> Output:
        """Run one turn of the loop: launch at most one step, and return new tokens and finished requests.

        A turn does the following, in this order:

        1. Ensure a free or evictable KV page for every decode row that needs a new one. If pages run out, wait for
           retiring pages, and then retract (vLLM: preempt) the youngest request: `_ensure_decode_pages`, `retract`.
        2. Schedule: the policy chooses rows among the running and the waiting requests: `Planner.next_rows`. The plan
           must fit into the step's tokens, rows and pages: `Planner.check`.
        3. Admit the waiting requests in the plan: lock their cached prefixes, allocate their KV pages, and evict cached
           pages if too few are free: `_admit`, `CacheManager.admit`.
        4. Allocate a KV page for each decode row whose last page is full: `CacheManager.allocate_decode_pages`.
        5. Build the Step and launch it, without waiting for the device: `_build`, `Engine.launch`.
        6. Insert into the prefix cache the prompt pages that the launched step computes: `_record_launch`,
           `CacheManager.cache_prompt`.
        7. Read the result of the step *before*, while the device computes the step just launched (overlap scheduling).
           Without overlap, or if there was nothing to launch, read the oldest result: `_process_result`.
        8. With that result, free the retired pages that waited for its step: `CacheManager.free_retired`. Append the
           sampled tokens. Finish requests that sampled a stop token or reached ``max_tokens``, and release their pages:
           `_finish`, `CacheManager.release`.
        """
        launched = self._launch()  # 1 to 6
        while len(self.in_flight) > (self.overlap_depth if launched else 0):
            self._process_result()  # 7 and 8
            if not launched:
                break
        if "pages_counted" in self.events.subscribed:
            allocator, cache = self.cache_manager.allocator, self.cache_manager.cache
            self.events.pages_counted(
                self.next_step_id, allocator.num_free, cache.total_pages, cache.evictable_pages, allocator.num_retiring
            )
        if not self.requests and not self.in_flight and not self._idle:
            self._idle = True
            self.cache_manager.allocator.check_idle(self.cache_manager.cache.total_pages)
        return self._pop_output()

    def _pop_output(self) -> Output:
        out, self._output = self._output, Output([], [], [], {})
        return out

    def _launch(self) -> bool:
        """Schedule, build and launch one step. Return False if there is nothing to launch."""
        self._ensure_decode_pages()
        views = self.request_table.running_views(self.next_step_id)
        if not views and not self.waiting:
            return False
        rows = self.planner.next_rows(views, bool(self.in_flight))
        if not rows:
            return False
        step, reqs = self._build(rows)
        self.events.batch_scheduled(step, reqs, self.clock())
        self.engine.launch(step)
        self._record_launch(step, reqs)
        return True

    def _ensure_decode_pages(self) -> None:
        """Ensure a free or evictable page for every decode row whose next token needs a new page.

        While there are too few pages, read the result of a step in flight if that frees pages; otherwise retract the
        youngest running request.
        """
        table, cache_manager = self.request_table, self.cache_manager
        while len(table.needing_page(table.decoding())) > cache_manager.num_available_pages:
            if self.in_flight and cache_manager.has_pending_frees:
                self._process_result()
                continue
            youngest = max(table.reqs, key=attrgetter("arrival"))
            assert len(table.reqs) > 1, "the KV pool cannot hold the only running request"
            self.retract(youngest)

    def retract(self, req: Req) -> None:
        """Release row and pages of a running request and return it to the waiting queue (vLLM: preempt).

        The request keeps its output. When it is admitted again, it prefills prompt and output, and then continues.
        """
        self.cache_manager.release(req)
        self._counts["retractions"] += 1
        req.queued_at_step = self.next_step_id
        insort(self.waiting, req, key=attrgetter("arrival"))
        self.events.request_retracted(req, self.next_step_id)

    # ---- building and launching a step -----------------------------------------------------------------

    def _build(self, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        """Check the planned rows (uid, tokens), admit their waiting requests, allocate pages and build the step.

        Return the step and the request of each row.
        """
        table, cache_manager = self.request_table, self.cache_manager
        uids, tokens = zip(*rows, strict=True)
        reqs = list(map(self.requests.get, uids))
        if None in reqs:
            raise PolicyError(f"the plan names request {uids[reqs.index(None)]}, which is not open")
        req_pool_indices, num_tokens = req_pool_indices_of(reqs), np.array(tokens, np.int32)  # type: ignore[arg-type]
        self.planner.check(reqs, req_pool_indices, num_tokens)  # type: ignore[arg-type]
        self.events.batch_planned(self.next_step_id, rows)
        admitted = [reqs[i] for i in np.flatnonzero(req_pool_indices < 0).tolist()]
        if admitted:
            self._admit(admitted)  # type: ignore[arg-type]
            req_pool_indices = req_pool_indices_of(reqs)  # type: ignore[arg-type]
        decodes = table.num_computed_tokens[req_pool_indices] >= table.num_prefill_tokens[req_pool_indices]
        num_decode = int(decodes.sum())
        if 0 < num_decode < len(reqs):  # decode rows first
            order = np.argsort(~decodes, kind="stable")
            req_pool_indices, num_tokens = req_pool_indices[order], num_tokens[order]
            reqs = [reqs[i] for i in order.tolist()]
        rows_without_page = table.needing_page(req_pool_indices[:num_decode])
        if len(rows_without_page):
            cache_manager.allocate_decode_pages(rows_without_page)
        starts = table.num_computed_tokens[req_pool_indices]
        step = Step(
            id=self.next_step_id,
            req_pool_indices=req_pool_indices,
            num_computed_tokens=starts,
            num_scheduled_tokens=num_tokens,
            num_decode=num_decode,
            sample=starts + num_tokens >= table.num_prefill_tokens[req_pool_indices],
            input_ids=self._input_ids(reqs, starts, num_tokens, num_decode),  # type: ignore[arg-type]
            page_table_updates=cache_manager.pop_page_table_updates(),
            admissions=tuple(self._admission_of(req) for req in admitted),  # type: ignore[arg-type]
        )
        return step, reqs  # type: ignore[return-value]

    def _admit(self, reqs: list[Req]) -> None:
        """Move waiting requests to the running ones: lock their cached prefixes and allocate their rows and pages."""
        for req in reqs:
            req.admission_order = self._admissions
            self._admissions += 1
        self.cache_manager.admit(reqs, self.next_step_id)
        admitted = {req.uid for req in reqs}
        self.waiting = [req for req in self.waiting if req.uid not in admitted]
        for req in reqs:
            num_cached_tokens = int(self.request_table.num_computed_tokens[req.req_pool_idx])
            self._counts["cached_tokens"] += num_cached_tokens
            if req.first_admission:
                req.num_cached_tokens, req.first_admission = num_cached_tokens, False

    def _admission_of(self, req: Req) -> Admission:
        """Return what the engine must know of an admitted request; its tokens only if a penalty counts them."""
        needs_history = req.params.needs_history
        return Admission(
            req.req_pool_idx,
            req.uid,
            req.params,
            req.seed,
            req.prompt_ids.copy() if needs_history else None,
            np.asarray(req.output_ids, np.int32) if needs_history else None,
        )

    def _input_ids(self, reqs: list[Req], starts: I32, num_tokens: I32, num_decode: int) -> I32:
        """Return the input ids of all rows in order: PENDING for decode rows, token ids for prefill chunks."""
        parts = [np.full(num_decode, PENDING, np.int32)]
        parts.extend(reqs[i].tokens()[starts[i] : starts[i] + num_tokens[i]] for i in range(num_decode, len(reqs)))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _record_launch(self, step: Step, reqs: list[Req]) -> None:
        """Record a launched step as in flight, and insert into the cache the prompt pages that it computes."""
        table = self.request_table
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        table.num_computed_tokens[step.req_pool_indices] = ends
        table.last_step[step.req_pool_indices] = step.id
        self.in_flight.append(
            InFlightStep(
                step.id,
                reqs,
                step.req_pool_indices.copy(),
                table.admission_order[step.req_pool_indices],
                ends,
                step.sample.copy(),
            )
        )
        self.cache_manager.last_launched_step = step.id
        self.next_step_id += 1
        for i in range(step.num_decode, len(reqs)):
            self.cache_manager.cache_prompt(reqs[i])
        counts = self._counts
        counts["steps"] += 1
        counts["decode_tokens"] += step.num_decode
        counts["prefill_tokens"] += len(step.input_ids) - step.num_decode

    # ---- the result --------------------------------------------------------------------------------------

    def _process_result(self) -> None:
        """Read the result of the oldest step in flight: free retired pages, append tokens, finish requests."""
        result = self.engine.result()
        step = self.in_flight.popleft()
        assert result.id == step.id, f"expected the result of step {step.id}, the engine returned step {result.id}"
        self.cache_manager.free_retired(step.id)
        table = self.request_table
        # A row gains its token only if the request still runs in the same admission: not ended, not retracted.
        gained = step.sample & (table.admission_order[step.req_pool_indices] == step.admission_orders)
        is_last = (step.ends + 1 >= table.max_len[step.req_pool_indices]).tolist()
        tokens = result.tokens[:, 0].tolist()
        out = self._output
        ended: list[tuple[Req, FinishReason]] = []
        reqs = step.reqs
        rows: Sequence[int] = range(len(tokens))
        all_gained = bool(gained.all())
        if not all_gained:
            rows = np.flatnonzero(gained).tolist()
            reqs, tokens = [reqs[i] for i in rows], [tokens[i] for i in rows]
            is_last = [is_last[i] for i in rows]
        out.uids.extend([req.uid for req in reqs])
        out.tokens.extend(tokens)
        for req, token, last in zip(reqs, tokens, is_last, strict=True):
            req.output_ids.append(token)
            if token in req.stop_ids:
                ended.append((req, "stop"))
            elif last:
                ended.append((req, "length"))
        if result.logprobs is not None:
            self._add_logprobs(result, rows, len(out.uids) - len(rows))
        self._counts["output_tokens"] += len(rows)
        if "step_finished" in self.events.subscribed:
            gaining: list[Req | None] = list(step.reqs)
            if not all_gained:
                gaining = [req if gains else None for req, gains in zip(step.reqs, gained.tolist(), strict=True)]
            self.events.step_finished(result, gaining, self.clock())
        for req, reason in ended:
            self._finish(req, reason)

    def _add_logprobs(self, result: StepResult, rows: Iterable[int], first: int) -> None:
        """Copy the log-probabilities of ``rows`` to the output, whose entries from ``first`` on are these rows."""
        assert result.logprobs is not None
        for k, i in enumerate(rows):
            logprobs = result.logprobs[i]
            if logprobs is not None:
                self._output.logprobs[first + k] = (logprobs.chosen, logprobs.top_ids, logprobs.top)

    def _finish(self, req: Req, reason: FinishReason) -> None:
        """End a running or waiting request: release its row and pages, if any, and send its final reply."""
        if req.req_pool_idx >= 0:
            self.cache_manager.release(req)
        else:
            self.waiting.remove(req)
        stop_id = req.output_ids[-1] if reason == "stop" else None
        self._reply(req, Finished(req.uid, reason, stop_id=stop_id))

    def _reply(self, req: Req, end: Finished) -> None:
        """Send the request's final reply, exactly one per request (promise 1)."""
        end.prompt_tokens, end.cached_tokens, end.output_tokens = (
            len(req.prompt_ids),
            req.num_cached_tokens,
            len(req.output_ids),
        )
        req.finish_reason, req.error = end.finish_reason, end.error
        del self.requests[req.uid]
        self._output.finished.append(end)
        self._counts[f"finished_{end.finish_reason}"] += 1
        self.events.request_finished(req, self.clock())

    # ---- counters and checks ---------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Return counters since the start and, with names that begin with ``num_``, current numbers."""
        allocator, cache = self.cache_manager.allocator, self.cache_manager.cache
        return {
            **self._counts,
            "evicted_pages": self.cache_manager.evicted_pages,
            "num_waiting_reqs": len(self.waiting),
            "num_running_reqs": len(self.request_table.reqs),
            "num_in_flight_steps": len(self.in_flight),
            "num_pages": self.spec.num_pages,
            "num_free_pages": allocator.num_free,
            "num_cached_pages": cache.total_pages,
            "num_evictable_pages": cache.evictable_pages,
            "num_retiring_pages": allocator.num_retiring,
        }

    def check_idle(self) -> None:
        """Raise AssertionError unless no request is open, no step is in flight and the KV pool is whole (promise 9)."""
        assert not self.requests, f"requests are open: {sorted(self.requests)}"
        assert not self.in_flight, f"steps are in flight: {[step.id for step in self.in_flight]}"
        self.cache_manager.cache.check()
        self.cache_manager.allocator.check(self.cache_manager.cache.total_pages)
        self.cache_manager.allocator.check_idle(self.cache_manager.cache.total_pages)


_COUNTERS = (
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "output_tokens",
    "retractions",
    "finished_stop",
    "finished_length",
    "finished_abort",
    "finished_error",
)
