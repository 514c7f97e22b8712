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
from minisgl.scheduler.base import Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.budget import Cost, StepBudget, WaitingView
from minisgl.scheduler.events import Events
from minisgl.scheduler.memory import Memory


class PolicyError(RuntimeError):
    """A policy answered with a plan that can't be carried out. Says what was wrong with it."""


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
        self.engine, self.policy, self.clock = engine, policy, clock
        self.spec = engine.spec
        self.max_prefill_tokens = max_prefill_tokens
        self.depth = 1 if overlap else 0
        self.starvation_steps = starvation_steps
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self.events = Events(hook)
        self.memory = Memory(self.spec, cache, self.events)
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
        rows = self._plan(views)
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
            self._retract(youngest)

    def _retract(self, req: Req) -> None:
        self.memory.release(req)
        self._counts["retractions"] += 1
        req.queued = self.next_step
        insort(self.waiting, req, key=attrgetter("arrival"))
        self.events.request_retracted(req, self.next_step)

    # ---- the plan --------------------------------------------------------------------------------------

    def _plan(self, views: list[Running]) -> Sequence[tuple[int, int]]:
        """The rows of the next step: those that were left out for too long, then the policy's."""
        if self._make_way():
            views = self.slots.views(self.next_step)
        budget = self._budget(Memory.LOOKAHEAD if self.waiting else 0)
        forced = self._starved(views, budget)
        if forced:
            taken = {uid for uid, _ in forced}
            views = [v for v in views if v.uid not in taken]
            queue = [req for req in self.waiting if req.uid not in taken]
        else:
            queue = self.waiting
        plan = self.policy.plan(WaitingView(len(queue), self._viewer(queue, views)), views, budget)
        if not isinstance(plan, Plan):
            raise PolicyError(f"plan() returned a {type(plan).__name__}; it must return a Plan(rows, retract)")
        rows = [*forced, *plan.rows] if forced else plan.rows
        if plan.retract:
            rows = self._carry_out(plan.retract, rows)
        if not rows and not self.flights:
            # Nothing is in flight, so waiting would change nothing: the oldest goes on.
            rows = self._oldest()
        return rows

    def _budget(self, ahead: int) -> StepBudget:
        """All that a step may take; ``ahead`` tokens of each running request are kept from those that wait."""
        return StepBudget(
            tokens=self.max_prefill_tokens,
            rows=self.memory.ledger.slots.free,
            pages=self.memory.available,
            reserve=self.slots.growth(ahead) if ahead else 0,
            cost=self._cost,
        )

    def _carry_out(self, retract: Sequence[int], rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Retract what the policy wants to, and return what still fits of its rows: what is retracted goes into the
        cache, so another's prompt may have less left to compute, and pages that could be evicted may be in use."""
        for uid in retract:
            req = self.open.get(uid)
            if req is None or req.slot < 0:
                raise PolicyError(f"the plan retracts request {uid}, which does not run")
            if any(uid == other for other, _ in rows):
                raise PolicyError(f"the plan retracts request {uid} and has a row for it too")
            self._retract(req)
        budget = self._budget(0)
        views: dict[int, Running | Waiting] = {v.uid: v for v in self.slots.views(self.next_step)}
        wanted = dict(rows)
        views |= {req.uid: self._view(req) for req in self.waiting if req.uid in wanted}
        return [(uid, n) for uid, want in rows if (n := budget.grant(views[uid], want) if uid in views else want)]

    def _cost(self, uid: int) -> Cost:
        return self.memory.cost(self.open[uid])

    def _viewer(self, queue: list[Req], views: list[Running]) -> Callable[[int], Waiting]:
        """Makes the policy's view of ``queue[i]``; asked for in order, so that a twin is always an earlier request."""
        memory, size, step = self.memory, self.spec.page_size, self.next_step
        computing: dict[int, int] = {}

        def claim(req: Req, page: int) -> int | None:
            page_hash = memory.next_page_hash(req, page)
            return None if page_hash is None else computing.setdefault(page_hash, req.uid)

        for view in views:
            if view.left:
                req = self.open[view.uid]
                claim(req, int(self.slots.computed[req.slot]) // size)

        def view_of(i: int) -> Waiting:
            req = queue[i]
            cached = len(memory.match(req).pages)
            first = claim(req, cached)
            twin = None if first == req.uid else first
            return Waiting(req.uid, req.arrival, len(req), cached * size, twin, step - req.queued)

        return view_of

    def _late(self) -> Req | None:
        """The oldest waiting request, if it was left out for ``starvation_steps`` steps."""
        first = self.waiting[0] if self.waiting else None
        return first if first is not None and self.next_step - first.queued >= self.starvation_steps else None

    def _make_way(self) -> bool:
        """Whether a running request was retracted for a late one that does not fit: the youngest of the younger ones.
        Behind older ones it is only late, not starved."""
        req = self._late()
        if req is None or self.memory.settling or self._budget(Memory.LOOKAHEAD).grant(self._view(req), 1):
            return False
        youngest = max(self.slots.reqs, key=attrgetter("arrival"), default=None)
        if youngest is None or youngest.arrival < req.arrival:
            return False
        self._retract(youngest)
        return True

    def _starved(self, views: list[Running], budget: StepBudget) -> list[tuple[int, int]]:
        """Promise 6: whoever was left out for ``starvation_steps`` steps takes part in this one."""
        rows = [(v.uid, n) for v in views if v.skipped >= self.starvation_steps and (n := budget.grant(v, v.left or 1))]
        req = self._late()
        if req is not None:
            view = self._view(req)
            if n := budget.grant(view, view.length - view.cached):
                return [*rows, (req.uid, n)]
            budget.rows = 0  # it is next: nobody else is seated before it
        return rows

    def _oldest(self) -> list[tuple[int, int]]:
        budget = self._budget(0)  # whatever the policy was granted: it did not use it
        for view in self.slots.views(self.next_step):
            if n := budget.grant(view, view.left or 1):
                return [(view.uid, n)]
        waiting = self._view(self.waiting[0]) if self.waiting else None
        if waiting is not None and (n := budget.grant(waiting, waiting.length - waiting.cached)):
            return [(waiting.uid, n)]
        return []

    def _view(self, req: Req) -> Waiting:
        """A waiting request on its own."""
        return self._viewer([req], [])(0)

    # ---- the step --------------------------------------------------------------------------------------

    def _build(self, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        """Check the rows, seat and grow their requests, and write the step down."""
        slots, memory = self.slots, self.memory
        uids, wanted = zip(*rows, strict=True)
        reqs = list(map(self.open.get, uids))
        if None in reqs:
            raise PolicyError(f"the plan names request {uids[reqs.index(None)]}, which is not open")
        self._check(reqs, wanted)  # type: ignore[arg-type]
        seated = [req for req in reqs if req.slot < 0]  # type: ignore[union-attr]
        if seated:
            self._seat(seated)  # type: ignore[arg-type]
        at = np.fromiter((req.slot for req in reqs), np.int32, len(reqs))  # type: ignore[union-attr]
        counts = np.asarray(wanted, np.int32)
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

    def _check(self, reqs: list[Req], wanted: Sequence[int]) -> None:
        """Raise `PolicyError` unless the rows fit: the scheduler's own count, whatever the policy was granted."""
        slots = self.slots
        if len(set(map(id, reqs))) < len(reqs):
            twice = {req.uid for req in reqs if sum(r is req for r in reqs) > 1}
            raise PolicyError(f"the plan names requests {sorted(twice)} more than once")
        at = np.fromiter((req.slot for req in reqs), np.int32, len(reqs))
        counts = np.asarray(wanted, np.int32)
        seated = at >= 0
        running = at[seated]
        left = slots.target[running] - slots.computed[running]
        most = np.ones(len(at), np.int64)
        most[seated] = np.where(left > 0, left, slots.computed[running] < slots.max_len[running] - 1)
        pages = len(slots.need_page(running[left <= 0]))
        for i in np.flatnonzero(~seated).tolist():
            most[i] = len(reqs[i]) - len(self.memory.match(reqs[i]).pages) * self.spec.page_size
            pages += self.memory.cost(reqs[i]).pages
        bad = np.flatnonzero((counts < 1) | (counts > most))
        if len(bad):
            i = int(bad[0])
            raise PolicyError(
                f"the plan gives request {reqs[i].uid} {int(counts[i])} tokens; it can compute "
                + (f"1 to {most[i]}" if most[i] else "none: its last token is on the way")
            )
        prefill = np.ones(len(at), bool)
        prefill[seated] = left > 0
        spent, free = int(counts[prefill].sum()), self.memory.ledger.slots.free
        if spent > self.max_prefill_tokens:
            raise PolicyError(f"the plan computes {spent} prompt tokens; a step may compute {self.max_prefill_tokens}")
        if int((~seated).sum()) > free:
            raise PolicyError(f"the plan seats {int((~seated).sum())} requests; {free} slots are free")
        if pages > self.memory.available:
            raise PolicyError(f"the plan takes {pages} pages; {self.memory.available} are free or evictable")

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
        rows = range(len(tokens)) if gained.all() else np.flatnonzero(gained).tolist()
        for i in rows:
            req, token = flight.reqs[i], tokens[i]
            req.output.append(token)
            uids.append(req.uid)
            news.append(token)
            if token in req.stop_ids:
                ended.append((req, "stop"))
            elif at_end[i]:
                ended.append((req, "length"))
        if result.logprobs is not None:
            self._add_logprobs(result, rows, len(uids) - len(rows))
        self._counts["output_tokens"] += len(rows)
        if "step_finished" in self.events.wants:
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
