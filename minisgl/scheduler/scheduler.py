"""The scheduler: requests in, Steps to the engine, tokens out. One for each engine, in rank 0's process.

Each turn of the loop frees what it must, asks the policy for a plan, checks it, seats and grows requests, launches one
step and reads the result of the one before. Knows nothing of models, devices or text. With overlap, the host prepares
step N+1 while the device computes step N: a token that such a step samples for a request that has ended meanwhile is
discarded.
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
    """A launched step whose result is unread."""

    id: int
    reqs: list[Req]
    req_pool_indices: I32
    admission_orders: I32
    ends: I32  # positions computed with it
    sample: Bools


class Scheduler:
    """Continuous batching over one engine (Orca, OSDI 2022), in pages (PagedAttention, arXiv:2309.06180)."""

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
        hook: Any | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.engine, self.clock = engine, clock
        self.spec = engine.spec
        self.overlap_depth = 1 if overlap else 0
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self.events = Events(hook)
        self.cache_manager = CacheManager(self.spec, cache, self.events)
        self.planner = Planner(self, policy, self.cache_manager, max_prefill_tokens, starvation_steps)
        self.request_table = self.cache_manager.request_table
        self.requests: dict[int, Req] = {}
        self.waiting: list[Req] = []  # by arrival
        self.in_flight: deque[InFlightStep] = deque()
        self.next_step_id = 0
        self._arrivals = 0
        self._admissions = 0
        self._output = Output()
        self._idle = True
        self._counts = dict.fromkeys(_COUNTERS, 0)

    # ---- requests ------------------------------------------------------------------------------------

    def add_request(self, uid: int, prompt: Sequence[int] | I32, params: SamplingParams) -> None:
        """Queue a request. Raises `InvalidRequestError`, naming the field, if it could never be served (promise 2)."""
        spec = self.spec
        ids = np.asarray(prompt, np.int64)
        if len(ids) == 0:
            raise InvalidRequestError("prompt", "The prompt is empty: it must have at least one token.")
        if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
            bad = int(ids[(ids < 0) | (ids >= spec.vocab_size)][0])
            raise InvalidRequestError("prompt", f"Token id {bad} is not in the vocabulary of {spec.vocab_size}.")
        params.check(spec.vocab_size)
        most = min(spec.max_seq_len, spec.num_pages * spec.page_size + 1)  # the last token's KV is never stored
        if len(ids) + params.max_tokens > most:
            limit = "the model's context" if most == spec.max_seq_len else "the KV pool"
            raise InvalidRequestError(
                "prompt" if len(ids) >= most else "max_tokens",
                f"The prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}; together they are over "
                f"the {most} that {limit} can hold.",
                "context_length_exceeded",
            )
        if uid in self.requests:
            raise ValueError(f"request {uid} is open already")
        req = Req(uid, ids.astype(np.int32), params, self._arrivals, self._seed_of(params))
        req.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        req.queued_at_step = self.next_step_id
        self._arrivals += 1
        self.requests[uid] = req
        self.waiting.append(req)
        self._idle = False
        self.events.request_added(req, self.clock())

    def _seed_of(self, params: SamplingParams) -> int:
        """The request's own seed, or one drawn from the scheduler's by arrival (splitmix64)."""
        if params.seed is not None:
            return params.seed
        x = (self.seed * 0x9E3779B97F4A7C15 + (self._arrivals + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0x94D049BB133111EB) & (2**64 - 1)
        return (x ^ (x >> 31)) >> 1

    def abort_request(self, uid: int) -> None:
        """End a request wherever it is. One that is not open is ignored: it may have ended meanwhile."""
        if uid in self.requests:
            self._finish(self.requests[uid], "abort")

    def fail(self, message: str) -> Output:
        """The engine is gone: end every open request with an error, and return these ends."""
        for req in list(self.requests.values()):
            self._reply(req, Finished(req.uid, "error", error=message))
        self.waiting.clear()
        self.in_flight.clear()
        return self._pop_output()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.requests or self.in_flight or self._output)

    # ---- the loop ------------------------------------------------------------------------------------

    def step(self) -> Output:
        """One turn: launch at most one step, read results down to the depth of overlap, return what came of it."""
        launched = self._launch()
        while len(self.in_flight) > (self.overlap_depth if launched else 0):
            self._process_result()
            if not launched:
                break
        if "pages_counted" in self.events.wants:
            ledger, cache = self.cache_manager.allocator, self.cache_manager.cache
            self.events.pages_counted(
                self.next_step_id, ledger.num_free, cache.total_pages, cache.evictable_pages, ledger.num_retiring
            )
        if not self.requests and not self.in_flight and not self._idle:
            self._idle = True
            self.cache_manager.allocator.check_idle(self.cache_manager.cache.total_pages)
        return self._pop_output()

    def _pop_output(self) -> Output:
        out, self._output = self._output, Output([], [], [], {})
        return out

    def _launch(self) -> bool:
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
        """See that every decode row finds the page it needs: wait for pages that retire, then retract the youngest."""
        memory = self.cache_manager
        while True:
            short = len(self.request_table.needing_page(self.request_table.decoding())) - memory.num_available_pages
            if short <= 0:
                return
            if self.in_flight and memory.has_pending_frees:
                self._process_result()
                continue
            youngest = max(self.request_table.reqs, key=attrgetter("arrival"))
            assert len(self.request_table.reqs) > 1, "the pool can't hold the one request that runs"
            self.retract(youngest)

    def retract(self, req: Req) -> None:
        """Take a running request's slot and pages and put it back into the queue; its output goes on where it was."""
        self.cache_manager.release(req)
        self._counts["retractions"] += 1
        req.queued_at_step = self.next_step_id
        insort(self.waiting, req, key=attrgetter("arrival"))
        self.events.request_retracted(req, self.next_step_id)

    # ---- the step --------------------------------------------------------------------------------------

    def _build(self, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        """Check the rows, seat and grow their requests, and write the step down."""
        slots, memory = self.request_table, self.cache_manager
        uids, wanted = zip(*rows, strict=True)
        reqs = list(map(self.requests.get, uids))
        if None in reqs:
            raise PolicyError(f"the plan names request {uids[reqs.index(None)]}, which is not open")
        at, counts = req_pool_indices_of(reqs), np.array(wanted, np.int32)  # type: ignore[arg-type]
        self.planner.check(reqs, at, counts)  # type: ignore[arg-type]
        self.events.batch_planned(self.next_step_id, rows)
        seated = [reqs[i] for i in np.flatnonzero(at < 0).tolist()]
        if seated:
            self._admit(seated)  # type: ignore[arg-type]
            at = req_pool_indices_of(reqs)  # type: ignore[arg-type]
        decode = slots.num_computed_tokens[at] >= slots.num_prefill_tokens[at]
        num_decode = int(decode.sum())
        if 0 < num_decode < len(at):  # decode rows first
            order = np.argsort(~decode, kind="stable")
            at, counts, reqs = at[order], counts[order], [reqs[i] for i in order.tolist()]
        need = slots.needing_page(at[:num_decode])
        if len(need):
            memory.allocate_decode_pages(need)
        starts = slots.num_computed_tokens[at]
        step = Step(
            id=self.next_step_id,
            req_pool_indices=at,
            num_computed_tokens=starts,
            num_scheduled_tokens=counts,
            num_decode=num_decode,
            sample=starts + counts >= slots.num_prefill_tokens[at],
            input_ids=self._tokens(reqs, starts, counts, num_decode),  # type: ignore[arg-type]
            page_table_updates=memory.pop_page_table_updates(),
            admissions=tuple(self._admission_of(req) for req in seated),  # type: ignore[arg-type]
        )
        return step, reqs  # type: ignore[return-value]

    def _admit(self, reqs: list[Req]) -> None:
        for req in reqs:
            req.admission_order = self._admissions
            self._admissions += 1
        self.cache_manager.admit(reqs, self.next_step_id)
        gone = {req.uid for req in reqs}
        self.waiting = [req for req in self.waiting if req.uid not in gone]
        for req in reqs:
            spared = int(self.request_table.num_computed_tokens[req.req_pool_idx])
            self._counts["cached_tokens"] += spared
            if req.first_admission:
                req.num_cached_tokens, req.first_admission = spared, False

    def _admission_of(self, req: Req) -> Admission:
        past = req.params.needs_history
        return Admission(
            req.req_pool_idx,
            req.uid,
            req.params,
            req.seed,
            req.prompt_ids.copy() if past else None,
            np.asarray(req.output_ids, np.int32) if past else None,
        )

    def _tokens(self, reqs: list[Req], starts: I32, counts: I32, num_decode: int) -> I32:
        parts = [np.full(num_decode, PENDING, np.int32)]
        parts.extend(reqs[i].tokens()[starts[i] : starts[i] + counts[i]] for i in range(num_decode, len(reqs)))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _record_launch(self, step: Step, reqs: list[Req]) -> None:
        """Book a step that the engine has taken."""
        slots = self.request_table
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        slots.num_computed_tokens[step.req_pool_indices] = ends
        slots.last_step[step.req_pool_indices] = step.id
        self.in_flight.append(
            InFlightStep(
                step.id,
                reqs,
                step.req_pool_indices.copy(),
                slots.admission_order[step.req_pool_indices],
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
        """Read the oldest unread step: hand out its tokens, end requests, let go of what waited for it."""
        result = self.engine.result()
        flight = self.in_flight.popleft()
        assert result.id == flight.id, f"step {flight.id} was due, the engine returned {result.id}"
        self.cache_manager.free_retired(flight.id)
        slots = self.request_table
        gained = flight.sample & (
            slots.admission_order[flight.req_pool_indices] == flight.admission_orders
        )  # else it ended or was retracted meanwhile
        at_end = (flight.ends + 1 >= slots.max_len[flight.req_pool_indices]).tolist()
        tokens = result.tokens[:, 0].tolist()
        out = self._output
        uids, news = out.uids, out.tokens
        ended: list[tuple[Req, FinishReason]] = []
        reqs = flight.reqs
        rows: Sequence[int] = range(len(tokens))
        whole = bool(gained.all())
        if not whole:
            rows = np.flatnonzero(gained).tolist()
            reqs, tokens = [reqs[i] for i in rows], [tokens[i] for i in rows]
            at_end = [at_end[i] for i in rows]
        uids.extend([req.uid for req in reqs])
        news.extend(tokens)
        for req, token, last in zip(reqs, tokens, at_end, strict=True):
            req.output_ids.append(token)
            if token in req.stop_ids:
                ended.append((req, "stop"))
            elif last:
                ended.append((req, "length"))
        if result.logprobs is not None:
            self._add_logprobs(result, rows, len(uids) - len(rows))
        self._counts["output_tokens"] += len(rows)
        if "step_finished" in self.events.wants:
            kept: list[Req | None] = list(flight.reqs)
            if not whole:
                kept = [req if ok else None for req, ok in zip(flight.reqs, gained.tolist(), strict=True)]
            self.events.step_finished(result, kept, self.clock())
        for req, reason in ended:
            self._finish(req, reason)

    def _add_logprobs(self, result: StepResult, rows: Iterable[int], first: int) -> None:
        assert result.logprobs is not None
        for k, i in enumerate(rows):
            logprobs = result.logprobs[i]
            if logprobs is not None:
                self._output.logprobs[first + k] = (logprobs.chosen, logprobs.top_ids, logprobs.top)

    def _finish(self, req: Req, reason: FinishReason) -> None:
        if req.req_pool_idx >= 0:
            self.cache_manager.release(req)
        else:
            self.waiting.remove(req)
        stop_id = req.output_ids[-1] if reason == "stop" else None
        self._reply(req, Finished(req.uid, reason, stop_id=stop_id))

    def _reply(self, req: Req, end: Finished) -> None:
        """The one final reply of a request (promise 1)."""
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

    # ---- what can be asked -----------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counts since the start, and pages and requests as they are now."""
        memory = self.cache_manager
        return {
            **self._counts,
            "waiting": len(self.waiting),
            "running": len(self.request_table.reqs),
            "unread_steps": len(self.in_flight),
            "evicted_pages": memory.evicted_pages,
            "pages": self.spec.num_pages,
            "pages_free": memory.allocator.num_free,
            "pages_cached": memory.cache.total_pages,
            "pages_evictable": memory.cache.evictable_pages,
            "pages_retiring": memory.allocator.num_retiring,
        }

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is open and the pool is whole (promise 9)."""
        assert not self.requests, f"requests are open: {sorted(self.requests)}"
        assert not self.in_flight, f"steps are unread: {[f.id for f in self.in_flight]}"
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
