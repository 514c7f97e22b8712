"""Drives the real scheduler, with any cache and policy, on the simulated engine, and judges what comes out.

Knows what a client knows (the requests and their answers) and the scheduler's public face; how the scheduler keeps
its promises is none of its business. A failed check is an AssertionError that says which promise was broken.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.core import EngineSpec, Finished, InvalidRequestError, Output, SamplingParams
from minisgl.kvcache import PrefixCache
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.testing.sim import SimCounts, SimEngine
from minisgl.testing.truth import Ask, Expected, expected_output

__all__ = ["Drive", "Job", "Report", "drive", "make_plugin"]


@dataclass(frozen=True)
class Job:
    """One client: sends its request before step ``arrive``, and hangs up before step ``abort``, if it does."""

    uid: int
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrive: int = 0
    abort: int | None = None

    @property
    def ask(self) -> Ask:
        return Ask(self.prompt, self.params)


@dataclass
class Report:
    """What a run came to. ``counts`` is the engine's; a gap is the steps between two tokens of one request."""

    counts: SimCounts
    steps: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    refused: dict[int, InvalidRequestError] = field(default_factory=dict)
    first_token: dict[int, int] = field(default_factory=dict)  # uid -> step
    worst_gap: int = 0

    @property
    def retractions(self) -> int:
        """Times that a request had to give up its slot and take one again."""
        return sum(times - 1 for times in self.counts.seats.values())

    @property
    def cached_tokens(self) -> int:
        return sum(end.cached_tokens for end in self.finished.values())


def make_plugin(group: str, name: str, **options: Any) -> Any:
    """The built-in cache or policy of this name: ``make_plugin("scheduler", "mixed", order="lpm")``. What the
    factory needs beside options (a cache: ``page_size``) is told from the dataclass's fields."""
    module = importlib.import_module(f"minisgl.plugins.{group}.{name}")
    config_type = next(cls for g, n, cls in module.minisgl_configs() if (g, n) == (group, name))
    known = config_type.__dataclass_fields__
    config = config_type(**{key: value for key, value in options.items() if key in known})
    given = {key: value for key, value in options.items() if key not in known}
    return getattr(module, f"minisgl_{group}")(config=config, **given)


class Drive:
    """A scheduler on a simulated engine, and its clients. ``thorough`` checks the cache after each step too."""

    def __init__(
        self,
        spec: EngineSpec,
        cache: PrefixCache,
        policy: SchedulerPolicy,
        *,
        overlap: bool = True,
        max_prefill_tokens: int = 8192,
        starvation_steps: int = 64,
        eos_ids: Collection[int] = (),
        hook: Any = None,
        thorough: bool = True,
        scheduler: Callable[..., Any] | None = None,
        engine: Callable[..., SimEngine] = SimEngine,
    ):
        if scheduler is None:
            from minisgl.scheduler.scheduler import Scheduler

            scheduler = Scheduler
        self.spec, self.cache, self.eos_ids, self.thorough = spec, cache, frozenset(eos_ids), thorough
        self.asks: dict[int, Ask] = {}
        self.engine = engine(spec, self.asks, eos_ids=eos_ids, depth=2 if overlap else 1)
        self.report = report = Report(self.engine.counts)
        self.scheduler = scheduler(
            self.engine,
            cache,
            policy,
            max_prefill_tokens=max_prefill_tokens,
            overlap=overlap,
            starvation_steps=starvation_steps,
            eos_ids=eos_ids,
            hook=hook,
            clock=lambda: float(report.steps),
        )
        self.patience = starvation_steps + 8
        self._expected: dict[int, Expected] = {}
        self._last: dict[int, int] = {}  # uid -> step of its last token
        self._hung_up: set[int] = set()
        self._leaving: set[int] = set()
        self._failed = False
        self._still = 0

    # ---- what clients do ------------------------------------------------------------------------------

    def add(self, job: Job) -> bool:
        """Send a request; whether it was accepted. Checks that what can't be served is refused (promise 2)."""
        must = must_refuse(self.spec, job.ask)
        self.asks[job.uid] = job.ask
        refusal: InvalidRequestError | None = None
        try:
            self.scheduler.add_request(job.uid, job.prompt, job.params)
        except InvalidRequestError as error:
            refusal = error
        if refusal is not None:
            assert must or not surely_fits(self.spec, job.ask), f"promise 2: refused without a reason: {refusal!r}"
            assert refusal.field, f"promise 2: the refusal names no field: {refusal}"
            del self.asks[job.uid]
            self.report.refused[job.uid] = refusal
            return False
        assert not must, f"promise 2: request {job.uid} was queued, although {must}"
        self.report.tokens[job.uid] = []
        self._expected[job.uid] = expected_output(job.ask, self.spec.vocab_size, self.eos_ids)
        return True

    def abort(self, uid: int) -> None:
        """The client of ``uid`` hangs up (whether it ever sent a request, or has its answer, does not matter). The next
        step must reply."""
        self._hung_up.add(uid)
        self.scheduler.abort_request(uid)
        self._leaving |= {uid} & (self.report.tokens.keys() - self.report.finished.keys())

    def fail(self, message: str) -> Output:
        """The engine is gone: every open request must end with an error now."""
        self._failed = True
        output: Output = self.scheduler.fail(message)
        self._judge(output)
        return output

    def step(self) -> Output:
        """One turn of the scheduler, judged."""
        before = self.engine.counts.steps, self.engine.unread, self.scheduler.has_work
        output: Output = self.scheduler.step()
        self._judge(output)
        self.report.steps += 1
        late = self._leaving - self.report.finished.keys()
        assert not late, f"the clients of {sorted(late)} hung up a step ago, and their requests go on"
        self._leaving.clear()
        moved = bool(output) or before != (self.engine.counts.steps, self.engine.unread, True)
        self._still = 0 if moved else self._still + 1
        if self._still > self.patience:
            open_uids = sorted(self.report.tokens.keys() - self.report.finished.keys())
            raise AssertionError(f"stuck: requests {open_uids} are open, and nothing moved for {self._still} steps")
        if self.thorough:
            self.cache.check()
        return output

    def run(self, jobs: Iterable[Job], max_steps: int = 100_000) -> Report:
        """Let each job do what it does, until the scheduler is idle; then check that everything is whole."""
        coming = sorted(jobs, key=lambda job: job.arrive)
        leaving = sorted((job.abort, job.uid) for job in coming if job.abort is not None)
        now = 0
        while coming or self.scheduler.has_work:
            if not self.scheduler.has_work:
                now = max(now, coming[0].arrive)
            while coming and coming[0].arrive <= now:
                self.add(coming.pop(0))
            while leaving and leaving[0][0] <= now:
                self.abort(leaving.pop(0)[1])
            if self.scheduler.has_work:
                self.step()
            now += 1
            assert now <= max_steps, f"not done after {max_steps} steps"
        self.check_idle()
        return self.report

    # ---- what is checked ------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Nothing runs: every request was answered, nothing is in flight, and the pool is whole (promises 1, 9)."""
        open_uids = self.report.tokens.keys() - self.report.finished.keys()
        assert not open_uids, f"promise 1: idle, but requests {sorted(open_uids)} have no final reply"
        assert self.engine.unread == 0, "idle, but a launched step was not read"
        self.scheduler.check_idle()
        self.cache.check()

    def probe(self) -> None:
        """Whether every page can still be had, whoever counts them: a request that needs them all must be served."""
        tokens = self.spec.num_pages * self.spec.page_size
        assert tokens <= self.spec.max_seq_len, "a probe needs a max_len of the whole pool"
        uid = max(self.asks, default=0) + 1
        self.run([Job(uid, [1] * (tokens - 1), SamplingParams(max_tokens=1, temperature=0.0), abort=None)])
        assert self.report.finished[uid].output_tokens == 1

    def _judge(self, output: Output) -> None:
        report = self.report
        for uid, token in zip(output.uids, output.tokens, strict=True):
            assert uid in report.tokens, f"a token for request {uid}, which was never accepted"
            assert uid not in report.finished, f"promise 1: request {uid} gained a token after its final reply"
            gained, expected = report.tokens[uid], self._expected[uid].tokens
            assert len(gained) < len(expected), f"request {uid} gained more than its {len(expected)} tokens"
            right = expected[len(gained)]
            assert token == right, f"promise 8: token {len(gained)} of request {uid} is {token}, not {right}"
            gained.append(token)
            report.first_token.setdefault(uid, report.steps)
            report.worst_gap = max(report.worst_gap, report.steps - self._last.get(uid, report.steps))
            self._last[uid] = report.steps
        for end in output.finished:
            self._judge_end(end)

    def _judge_end(self, end: Finished) -> None:
        uid, report = end.uid, self.report
        assert uid in report.tokens, f"promise 1: a final reply to request {uid}, which was never accepted"
        assert uid not in report.finished, f"promise 1: a second final reply to request {uid}"
        report.finished[uid] = end
        gained, expected, prompt = report.tokens[uid], self._expected[uid], self.asks[uid].prompt
        if end.finish_reason == "abort":
            assert uid in self._hung_up, f"request {uid} was aborted, but its client is still there"
        elif end.finish_reason == "error":
            assert self._failed, f"request {uid} failed: {end.error}"
        else:
            assert gained == expected.tokens, f"promise 8: request {uid} got {gained}, not {expected.tokens}"
            ended = end.finish_reason, end.stop_id
            assert ended == (expected.reason, expected.stop_id), f"request {uid} ended by {ended}, not {expected}"
        assert end.prompt_tokens == len(prompt), f"usage: {end.prompt_tokens} prompt tokens of {len(prompt)}"
        assert end.output_tokens == len(gained), f"usage: {end.output_tokens} output tokens of {len(gained)}"
        assert 0 <= end.cached_tokens < len(prompt), f"usage: {end.cached_tokens} cached tokens of {len(prompt)}"
        if end.finish_reason in ("stop", "length") and report.counts.seats[uid] == 1:
            spared = len(prompt) + len(gained) - 1 - report.counts.computed_by[uid]
            # One position more may have been computed before the end was known.
            assert 0 <= end.cached_tokens - spared <= 1, (
                f"usage: {end.cached_tokens} cached tokens reported, {spared} positions were not computed"
            )


def must_refuse(spec: EngineSpec, ask: Ask) -> str:
    """Why the request can never be served; empty if it may be."""
    longest = len(ask.prompt) + ask.params.max_tokens
    if len(ask.prompt) == 0:
        return "its prompt is empty"
    if longest > spec.max_seq_len:
        return f"prompt and max_tokens are {longest} tokens, the longest sequence is {spec.max_seq_len}"
    if longest - 1 > spec.num_pages * spec.page_size:  # the last token needs no KV
        return f"it needs {longest - 1} tokens of KV, the pool holds {spec.num_pages * spec.page_size}"
    if min(ask.prompt) < 0 or max(ask.prompt) >= spec.vocab_size:
        return f"a prompt token is not in the vocabulary of {spec.vocab_size}"
    try:
        ask.params.check(spec.vocab_size)
    except InvalidRequestError as refusal:
        return refusal.message
    return ""


def surely_fits(spec: EngineSpec, ask: Ask) -> bool:
    """Whether there is room even for the KV of the last token, which nobody needs."""
    return len(ask.prompt) + ask.params.max_tokens <= spec.num_pages * spec.page_size


def drive(jobs: Iterable[Job], spec: EngineSpec, cache: PrefixCache, policy: SchedulerPolicy, **options: Any) -> Report:
    """Run ``jobs`` through the real scheduler to the end, with every check; ``options`` are `Drive`'s."""
    return Drive(spec, cache, policy, **options).run(jobs)
