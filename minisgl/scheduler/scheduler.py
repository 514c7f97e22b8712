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
    Bools,
    Engine,
    Finished,
    FinishReason,
    Output,
    Refused,
    Req,
    SamplingParams,
    Seat,
    Step,
    StepResult,
)
from minisgl.kvcache import PrefixCache
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.scheduler.cache_manager import Memory
from minisgl.scheduler.events import Events
from minisgl.scheduler.planner import Planner, PolicyError, slots_of


class _Flight(NamedTuple):
    """A launched step whose result is unread."""

    id: int
    reqs: list[Req]
    slots: I32
    seats: I32
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
        self.depth = 1 if overlap else 0
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self.events = Events(hook)
        self.memory = Memory(self.spec, cache, self.events)
        self.planner = Planner(self, policy, self.memory, max_prefill_tokens, starvation_steps)
        self.slots = self.memory.slots
        self.open: dict[int, Req] = {}
        self.waiting: list[Req] = []  # by arrival
        self.flights: deque[_Flight] = deque()
        self.next_step = 0
        self._arrivals = 0
        self._admissions = 0
        self._out = Output()
        self._idle = True
        self._counts = dict.fromkeys(_COUNTERS, 0)

    # ---- requests ------------------------------------------------------------------------------------

    def add(self, uid: int, prompt: Sequence[int] | I32, params: SamplingParams) -> None:
        """Queue a request. Raises `Refused`, naming the field, if it could never be served (promise 2)."""
        spec = self.spec
        ids = np.asarray(prompt, np.int64)
        if len(ids) == 0:
            raise Refused("prompt", "The prompt is empty: it must have at least one token.")
        if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
            bad = int(ids[(ids < 0) | (ids >= spec.vocab_size)][0])
            raise Refused("prompt", f"Token id {bad} is not in the vocabulary of {spec.vocab_size}.")
        params.check(spec.vocab_size)
        most = min(spec.max_len, spec.num_pages * spec.page_size + 1)  # the last token's KV is never stored
        if len(ids) + params.max_tokens > most:
            limit = "the model's context" if most == spec.max_len else "the KV pool"
            raise Refused(
                "prompt" if len(ids) >= most else "max_tokens",
                f"The prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}; together they are over "
                f"the {most} that {limit} can hold.",
                "context_length_exceeded",
            )
        if uid in self.open:
            raise ValueError(f"request {uid} is open already")
        req = Req(uid, ids.astype(np.int32), params, self._arrivals, self._seed_of(params))
        req.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        req.queued = self.next_step
        self._arrivals += 1
        self.open[uid] = req
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

    def abort(self, uid: int) -> None:
        """End a request wherever it is. One that is not open is ignored: it may have ended meanwhile."""
        if uid in self.open:
            self._finish(self.open[uid], "abort")

    def fail(self, message: str) -> Output:
        """The engine is gone: end every open request with an error, and return these ends."""
        for req in list(self.open.values()):
            self._reply(req, Finished(req.uid, "error", error=message))
        self.waiting.clear()
        self.flights.clear()
        return self._take_output()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.open or self.flights or self._out)

    # ---- the loop ------------------------------------------------------------------------------------

    def step(self) -> Output:
        """One turn: launch at most one step, read results down to the depth of overlap, return what came of it."""
        launched = self._launch()
        while len(self.flights) > (self.depth if launched else 0):
            self._read()
            if not launched:
                break
        if "pages_counted" in self.events.wants:
            ledger, cache = self.memory.ledger, self.memory.cache
            self.events.pages_counted(self.next_step, ledger.free, cache.held, cache.evictable, ledger.retiring)
        if not self.open and not self.flights and not self._idle:
            self._idle = True
            self.memory.ledger.check_idle(self.memory.cache.held)
        return self._take_output()

    def _take_output(self) -> Output:
        out, self._out = self._out, Output([], [], [], {})
        return out

    def _launch(self) -> bool:
        self._make_room()
        views = self.slots.views(self.next_step)
        if not views and not self.waiting:
            return False
        rows = self.planner.rows(views, bool(self.flights))
        if not rows:
            return False
        step, reqs = self._build(rows)
        self.events.batch_scheduled(step, reqs, self.clock())
        self.engine.launch(step)
        self._launched(step, reqs)
        return True

    def _make_room(self) -> None:
        """See that every decode row finds the page it needs: wait for pages that retire, then retract the youngest."""
        memory = self.memory
        while True:
            short = len(self.slots.need_page(self.slots.decoding())) - memory.available
            if short <= 0:
                return
            if self.flights and memory.settling:
                self._read()
                continue
            youngest = max(self.slots.reqs, key=attrgetter("arrival"))
            assert len(self.slots.reqs) > 1, "the pool can't hold the one request that runs"
            self.retract(youngest)

    def retract(self, req: Req) -> None:
        """Take a running request's slot and pages and put it back into the queue; its output goes on where it was."""
        self.memory.release(req)
        self._counts["retractions"] += 1
        req.queued = self.next_step
        insort(self.waiting, req, key=attrgetter("arrival"))
        self.events.request_retracted(req, self.next_step)

    # ---- the step --------------------------------------------------------------------------------------

    def _build(self, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        """Check the rows, seat and grow their requests, and write the step down."""
        slots, memory = self.slots, self.memory
        uids, wanted = zip(*rows, strict=True)
        reqs = list(map(self.open.get, uids))
        if None in reqs:
            raise PolicyError(f"the plan names request {uids[reqs.index(None)]}, which is not open")
        at, counts = slots_of(reqs), np.array(wanted, np.int32)  # type: ignore[arg-type]
        self.planner.check(reqs, at, counts)  # type: ignore[arg-type]
        self.events.batch_planned(self.next_step, rows)
        seated = [reqs[i] for i in np.flatnonzero(at < 0).tolist()]
        if seated:
            self._seat(seated)  # type: ignore[arg-type]
            at = slots_of(reqs)  # type: ignore[arg-type]
        decode = slots.computed[at] >= slots.target[at]
        num_decode = int(decode.sum())
        if 0 < num_decode < len(at):  # decode rows first
            order = np.argsort(~decode, kind="stable")
            at, counts, reqs = at[order], counts[order], [reqs[i] for i in order.tolist()]
        need = slots.need_page(at[:num_decode])
        if len(need):
            memory.grow(need)
        starts = slots.computed[at]
        step = Step(
            id=self.next_step,
            slots=at,
            starts=starts,
            counts=counts,
            num_decode=num_decode,
            sample=starts + counts >= slots.target[at],
            tokens=self._tokens(reqs, starts, counts, num_decode),  # type: ignore[arg-type]
            table=memory.table_writes(),
            seats=tuple(self._seat_of(req) for req in seated),  # type: ignore[arg-type]
        )
        return step, reqs  # type: ignore[return-value]

    def _seat(self, reqs: list[Req]) -> None:
        for req in reqs:
            req.seated = self._admissions
            self._admissions += 1
        self.memory.seat(reqs, self.next_step)
        gone = {req.uid for req in reqs}
        self.waiting = [req for req in self.waiting if req.uid not in gone]
        for req in reqs:
            spared = int(self.slots.computed[req.slot])
            self._counts["cached_tokens"] += spared
            if req.first_seat:
                req.cached, req.first_seat = spared, False

    def _seat_of(self, req: Req) -> Seat:
        past = req.params.needs_history
        return Seat(
            req.slot,
            req.uid,
            req.params,
            req.seed,
            req.prompt.copy() if past else None,
            np.asarray(req.output, np.int32) if past else None,
        )

    def _tokens(self, reqs: list[Req], starts: I32, counts: I32, num_decode: int) -> I32:
        parts = [np.full(num_decode, PENDING, np.int32)]
        parts.extend(reqs[i].tokens()[starts[i] : starts[i] + counts[i]] for i in range(num_decode, len(reqs)))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _launched(self, step: Step, reqs: list[Req]) -> None:
        """Book a step that the engine has taken."""
        slots = self.slots
        ends = step.starts + step.counts
        slots.computed[step.slots] = ends
        slots.last[step.slots] = step.id
        self.flights.append(_Flight(step.id, reqs, step.slots.copy(), slots.seat[step.slots], ends, step.sample.copy()))
        self.memory.launched = step.id
        self.next_step += 1
        for i in range(step.num_decode, len(reqs)):
            self.memory.cache_prompt(reqs[i])
        counts = self._counts
        counts["steps"] += 1
        counts["decode_tokens"] += step.num_decode
        counts["prefill_tokens"] += len(step.tokens) - step.num_decode

    # ---- the result --------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the oldest unread step: hand out its tokens, end requests, let go of what waited for it."""
        result = self.engine.result()
        flight = self.flights.popleft()
        assert result.id == flight.id, f"step {flight.id} was due, the engine returned {result.id}"
        self.memory.done(flight.id)
        slots = self.slots
        gained = flight.sample & (slots.seat[flight.slots] == flight.seats)  # else it ended or was retracted meanwhile
        at_end = (flight.ends + 1 >= slots.max_len[flight.slots]).tolist()
        tokens = result.tokens[:, 0].tolist()
        out = self._out
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
            req.output.append(token)
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
                self._out.logprobs[first + k] = (logprobs.chosen, logprobs.top_ids, logprobs.top)

    def _finish(self, req: Req, reason: FinishReason) -> None:
        if req.slot >= 0:
            self.memory.release(req)
        else:
            self.waiting.remove(req)
        stop_id = req.output[-1] if reason == "stop" else None
        self._reply(req, Finished(req.uid, reason, stop_id=stop_id))

    def _reply(self, req: Req, end: Finished) -> None:
        """The one final reply of a request (promise 1)."""
        end.prompt_tokens, end.cached_tokens, end.output_tokens = len(req.prompt), req.cached, len(req.output)
        req.reason, req.error = end.reason, end.error
        del self.open[req.uid]
        self._out.finished.append(end)
        self._counts[f"finished_{end.reason}"] += 1
        self.events.request_finished(req, self.clock())

    # ---- what can be asked -----------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counts since the start, and pages and requests as they are now."""
        memory = self.memory
        return {
            **self._counts,
            "waiting": len(self.waiting),
            "running": len(self.slots.reqs),
            "unread_steps": len(self.flights),
            "evicted_pages": memory.evicted_pages,
            "pages": self.spec.num_pages,
            "pages_free": memory.ledger.free,
            "pages_cached": memory.cache.held,
            "pages_evictable": memory.cache.evictable,
            "pages_retiring": memory.ledger.retiring,
        }

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is open and the pool is whole (promise 9)."""
        assert not self.open, f"requests are open: {sorted(self.open)}"
        assert not self.flights, f"steps are unread: {[f.id for f in self.flights]}"
        self.memory.cache.check()
        self.memory.ledger.check(self.memory.cache.held)
        self.memory.ledger.check_idle(self.memory.cache.held)


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
