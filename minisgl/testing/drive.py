"""Runs the real scheduler, with any cache and policy, on the simulated engine, and checks every output.

The checks use only the requests, their expected outputs and the scheduler's public methods. A failed check is an
AssertionError that says which promise was broken.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.core import EngineSpec, Finished, InvalidRequestError, Output, Req, SamplingParams
from minisgl.plugins.cache.base import PrefixCache
from minisgl.plugins.cache.prefix import make_manager
from minisgl.plugins.scheduler.guard import StarvationGuard
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.scheduler.observer import HookObserver
from minisgl.testing.idle import check_idle
from minisgl.testing.sim import SimCounts, SimEngine
from minisgl.testing.truth import Expected, ExpectedTokens, SimRequest, expected_output, score

if TYPE_CHECKING:
    from minisgl.plugins.speculation import DraftProposer
    from minisgl.testing.drafts import SeededProposer
    from minisgl.testing.fake_grammar import FakeGrammar

__all__ = ["Drive", "Job", "Report", "drive", "make_plugin"]

WHOLE_POOL_CHUNK = 64
"""The smallest limit of prompt tokens in a step of `Drive.check_whole_pool`."""


@dataclass(frozen=True)
class Job:
    """A request, sent before step ``arrive`` of the run, and aborted before step ``abort`` unless ``abort`` is None.

    ``grammar`` is the number of a made-up grammar of `minisgl.testing.truth`; None: the request has no grammar.
    ``group`` is an argument of `Scheduler.add_request`.
    """

    uid: int
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrive: int = 0
    abort: int | None = None
    grammar: int | None = None
    group: int = 0

    @property
    def request(self) -> SimRequest:
        """Prompt and sampling parameters, without the arrival."""
        return SimRequest(self.prompt, self.params, self.grammar)


@dataclass
class Report:
    """The outcome of a run.

    - ``counts``: what the simulated engine computed.
    - ``steps``: turns of the scheduler's loop.
    - ``tokens``: output tokens by uid.
    - ``logprobs``: log-probabilities of the output tokens by uid, for requests that ask for them.
    - ``prompt_logprobs``: the same for the tokens of the prompt.
    - ``finished``: final replies by uid.
    - ``refused``: errors of the rejected requests by uid.
    - ``first_token``: the step in which each request got its first token, by uid.
    - ``worst_gap``: the largest number of steps between two consecutive tokens of a request.
    - ``stored_blocks``, ``removed_blocks``: pages that the cache stored and removed, by the KV events of a
      `KVEventsDrive`.
    """

    counts: SimCounts
    steps: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[float]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    refused: dict[int, InvalidRequestError] = field(default_factory=dict)
    first_token: dict[int, int] = field(default_factory=dict)  # uid -> step
    worst_gap: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0

    @property
    def retractions(self) -> int:
        """Number of times that a request was admitted again after it was retracted."""
        return sum(times - 1 for times in self.counts.admissions.values())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, over all finished requests."""
        return sum(reply.cached_tokens for reply in self.finished.values())


def make_plugin(group: str, name: str, **options: Any) -> Any:
    """Build a built-in cache, policy or proposer by name: ``make_plugin("scheduler", "mixed", order="lpm")``.

    ``options`` that are fields of the plugin's options dataclass are its options. All other ``options`` are arguments
    of its method ``build``, for example ``page_size`` of a cache.
    """
    module = importlib.import_module(f"minisgl.plugins.{group}.{name}")
    config_type = next(cls for g, n, cls in module.minisgl_configs() if (g, n) == (group, name))
    known = config_type.__dataclass_fields__
    config = config_type(**{key: value for key, value in options.items() if key in known})
    arguments = {key: value for key, value in options.items() if key not in known}
    return config.build(**{key: arguments[key] for key in inspect.signature(config.build).parameters})


class Drive:
    """A scheduler on a simulated engine, with methods that do what clients do and check what the scheduler returns.

    ``overlap``, ``max_prefill_tokens``, ``starvation_steps`` and ``eos_ids`` are arguments of the scheduler and its
    guard. ``observers`` is the ``hook`` of a plugin manager, or None. With ``thorough``, `step` also calls the cache's
    own check. ``scheduler`` and ``engine`` replace the classes `Scheduler` and `SimEngine`. ``drafts`` is (largest
    number of draft tokens of a row, percentage of right ones, seed): the arguments of a `SeededProposer`; ``proposer``
    is another proposer; both None: no speculation. With ``adapt_drafts``, the number of drafts follows how many were
    accepted. ``rounds`` is the largest number of rounds of a step; with ``full_drafts``, rows get as many ``drafts`` as
    they may, so most steps can have several.
    """

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
        observers: Any = None,
        thorough: bool = True,
        drafts: tuple[int, int, int] | None = None,
        proposer: DraftProposer | None = None,
        adapt_drafts: bool = False,
        rounds: int = 1,
        full_drafts: bool = False,
        scheduler: Callable[..., Any] | None = None,
        engine: Callable[..., SimEngine] = SimEngine,
    ):
        if scheduler is None:
            from minisgl.scheduler.scheduler import Scheduler

            scheduler = Scheduler
        self.spec, self.cache, self.eos_ids, self.thorough = spec, cache, frozenset(eos_ids), thorough
        self.requests: dict[int, SimRequest] = {}
        self.engine = engine(spec, self.requests, eos_ids=eos_ids, depth=2 if overlap else 1)
        self.report = report = Report(self.engine.counts)
        if drafts is not None:
            proposer = self._proposer(*drafts, full_drafts)

        def clock() -> float:
            return float(report.steps)

        speculation = None
        if proposer is not None:
            speculation = proposer.speculate(spec, clock, adapt=adapt_drafts, rounds=rounds)
        self.scheduler = scheduler(
            self.engine,
            cache,
            StarvationGuard(policy, starvation_steps),
            max_prefill_tokens=max_prefill_tokens,
            overlap=overlap,
            eos_ids=eos_ids,
            observer=None if observers is None else HookObserver(observers),
            clock=clock,
            constraint_of=self._grammar_of,
            speculation=speculation,
            make_manager=make_manager,
        )
        self.max_drafts, self.rounds = 0 if proposer is None else proposer.max_drafts, rounds
        self.max_idle_steps = starvation_steps + 8
        self._expected: dict[int, Expected] = {}
        self._streams: dict[int, ExpectedTokens] = {}
        self._last_token_step: dict[int, int] = {}  # uid -> step of its last token
        self._aborted: set[int] = set()
        self._aborting: set[int] = set()  # aborted since the last step
        self._failed = False
        self._idle_steps = 0  # steps in a row without progress

    def _proposer(self, max_drafts: int, percent: int, seed: int, full: bool) -> SeededProposer:
        from minisgl.testing.drafts import SeededProposer  # without drafts, plugins/speculation may be missing

        return SeededProposer(
            self.requests, self.spec.vocab_size, max_drafts=max_drafts, percent=percent, seed=seed, full=full
        )

    def _grammar_of(self, req: Req) -> FakeGrammar | None:
        request = self.requests[req.uid]
        if request.grammar is None:
            return None
        from minisgl.testing.fake_grammar import FakeGrammar  # without grammars, plugins/constraint may be missing

        return FakeGrammar(request, self.spec.vocab_size)

    # ---- what clients do ------------------------------------------------------------------------------

    def add(self, job: Job) -> bool:
        """Send a request and return whether the scheduler accepted it.

        Check that the scheduler rejects a request that can never be served, and accepts every other (promise 2).
        It may also reject a request that fits into the pool only without the KV of its last output token.
        """
        reason = rejection_reason(self.spec, job.request)
        self.requests[job.uid] = job.request
        rejection: InvalidRequestError | None = None
        try:
            self.scheduler.add_request(job.uid, job.prompt, job.params, **({"group": job.group} if job.group else {}))
        except InvalidRequestError as error:
            rejection = error
        if rejection is not None:
            assert reason or not surely_fits(self.spec, job.request), (
                f"promise 2: request {job.uid} can be served, but the scheduler rejected it: {rejection!r}"
            )
            assert rejection.field, f"promise 2: the rejection of request {job.uid} names no field: {rejection}"
            del self.requests[job.uid]
            self.report.refused[job.uid] = rejection
            return False
        assert not reason, f"promise 2: request {job.uid} was queued, although {reason}"
        self.report.tokens[job.uid] = []
        self._streams[job.uid] = ExpectedTokens(job.request, self.spec.vocab_size)
        self._expected[job.uid] = expected_output(job.request, self.spec.vocab_size, self.eos_ids)
        return True

    def abort(self, uid: int) -> None:
        """Abort request ``uid``, which may be unknown or finished. If it is open, the next step must finish it."""
        self._aborted.add(uid)
        self.scheduler.abort_request(uid)
        self._aborting |= {uid} & (self.report.tokens.keys() - self.report.finished.keys())

    def fail(self, message: str) -> Output:
        """Report an engine failure to the scheduler. It must finish every open request with an error."""
        self._failed = True
        output: Output = self.scheduler.fail(message)
        self._check_output(output)
        return output

    def step(self) -> Output:
        """Run one turn of the scheduler's loop and check its output."""
        before = self.engine.counts.steps, self.engine.unread, self.scheduler.has_work
        output: Output = self.scheduler.step()
        self._check_output(output)
        self.report.steps += 1
        late = self._aborting - self.report.finished.keys()
        assert not late, f"requests {sorted(late)} were aborted before this step, and the step did not finish them"
        self._aborting.clear()
        progress = bool(output) or before != (self.engine.counts.steps, self.engine.unread, True)
        self._idle_steps = 0 if progress else self._idle_steps + 1
        if self._idle_steps > self.max_idle_steps:
            open_uids = sorted(self.report.tokens.keys() - self.report.finished.keys())
            text = f"stuck: requests {open_uids} are not finished, but {self._idle_steps} steps in a row made no"
            raise AssertionError(f"{text} progress; at most {self.max_idle_steps} are allowed")
        if self.thorough and hasattr(self.cache, "check"):
            self.cache.check()
        return output

    def run(self, jobs: Iterable[Job], max_steps: int = 100_000) -> Report:
        """Send and abort the requests at their steps, step until the scheduler is idle, then do `check_idle`.

        Raise AssertionError if a check fails, or if the scheduler is not idle after ``max_steps`` steps.
        """
        arrivals = sorted(jobs, key=lambda job: job.arrive)
        aborts = sorted((job.abort, job.uid) for job in arrivals if job.abort is not None)
        now = 0
        while arrivals or self.scheduler.has_work:
            if not self.scheduler.has_work:
                now = max(now, arrivals[0].arrive)
            while arrivals and arrivals[0].arrive <= now:
                self.add(arrivals.pop(0))
            while aborts and aborts[0][0] <= now:
                self.abort(aborts.pop(0)[1])
            if self.scheduler.has_work:
                self.step()
            now += 1
            assert now <= max_steps, f"expected all requests to finish within {max_steps} steps; some are still open"
        self.check_idle()
        return self.report

    # ---- checks ---------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Check an idle scheduler: all requests finished, no step in flight, the pool whole (promises 1 and 9)."""
        open_uids = self.report.tokens.keys() - self.report.finished.keys()
        assert not open_uids, f"promise 1: the scheduler is idle, but requests {sorted(open_uids)} have no final reply"
        assert self.engine.unread == 0, (
            f"the scheduler is idle, but the results of {self.engine.unread} launched steps were not read"
        )
        check_idle(self.scheduler)

    @property
    def num_cached_pages(self) -> int:
        """Number of pages that the prefix cache owns."""
        return self.scheduler.cache_manager.page_counts()[1]

    def check_whole_pool(self) -> None:
        """Check that all pages can be allocated: run a request that needs every page of the pool.

        This finds lost pages without the scheduler's own counts. Its chunks have at least `WHOLE_POOL_CHUNK` tokens:
        with a limit of one token a step, it would take as many steps as all other requests together.
        """
        planner = self.scheduler.planner
        planner.max_prefill_tokens = max(planner.max_prefill_tokens, WHOLE_POOL_CHUNK)
        tokens = self.spec.num_pages * self.spec.page_size
        assert tokens <= self.spec.max_seq_len, (
            f"check_whole_pool needs max_seq_len of at least the pool's {tokens} tokens; it is {self.spec.max_seq_len}"
        )
        uid = max(self.requests, default=0) + 1
        self.run([Job(uid, [1] * (tokens - 1), SamplingParams(max_tokens=1, temperature=0.0), abort=None)])
        num_tokens = self.report.finished[uid].output_tokens
        assert num_tokens == 1, f"the request that needs every page got {num_tokens} output tokens; expected 1"

    def _check_output(self, output: Output) -> None:
        report = self.report
        for uid, token in zip(output.uids, output.tokens, strict=True):
            assert uid in report.tokens, f"the output has a token for request {uid}, which was never accepted"
            assert uid not in report.finished, f"promise 1: request {uid} gained a token after its final reply"
            tokens, expected = report.tokens[uid], self._expected[uid].tokens
            assert len(tokens) < len(expected), f"request {uid} gained more than its {len(expected)} expected tokens"
            right = expected[len(tokens)]
            assert token == right, f"promise 8: output token {len(tokens)} of request {uid} is {token}, not {right}"
            tokens.append(token)
            report.first_token.setdefault(uid, report.steps)
            report.worst_gap = max(report.worst_gap, report.steps - self._last_token_step.get(uid, report.steps))
            self._last_token_step[uid] = report.steps
        self._check_logprobs(output)
        for reply in output.finished:
            self._check_finished(reply)

    def _check_logprobs(self, output: Output) -> None:
        """Check that each output token and each prompt token of the output has its own log-probability."""
        report = self.report
        for index, uid in enumerate(output.uids):
            wanted = self.requests[uid].params.logprobs is not None
            assert wanted == (index in output.logprobs), (
                f"token {index} of the output has {'no' if wanted else 'a'} log-probability, and request {uid} asked "
                f"for {'it' if wanted else 'none'}"
            )
            if wanted:
                seen = report.logprobs.setdefault(uid, [])
                self._check_score(uid, len(self.requests[uid].prompt) + len(seen), output.logprobs[index][0])
                seen.append(output.logprobs[index][0])
        for uid, entries in output.prompt_logprobs.items():
            for chosen, _, _ in entries:
                seen = report.prompt_logprobs.setdefault(uid, [])
                self._check_score(uid, max(self.requests[uid].params.logprob_start_len, 1) + len(seen), chosen)
                seen.append(chosen)

    def _check_score(self, uid: int, position: int, seen: float) -> None:
        stream = self._streams[uid]
        stream.extend(position + 1)
        right = score(int(stream.hashes[position]), stream[position])
        assert seen == right, f"promise 8: the log-probability of position {position} of request {uid} is another's"

    def _check_finished(self, reply: Finished) -> None:
        uid, report = reply.uid, self.report
        assert uid in report.tokens, f"promise 1: a final reply to request {uid}, which was never accepted"
        assert uid not in report.finished, f"promise 1: a second final reply to request {uid}"
        report.finished[uid] = reply
        tokens, expected, prompt = report.tokens[uid], self._expected[uid], self.requests[uid].prompt
        if reply.finish_reason == "abort":
            assert uid in self._aborted, f"request {uid} ended with finish_reason abort, but it was not aborted"
        elif reply.finish_reason == "error" and self._failed:
            pass
        else:
            assert tokens == expected.tokens, (
                f"promise 8: request {uid} got the tokens {tokens}, expected {expected.tokens}"
            )
            seen, right = (reply.finish_reason, reply.stop_id), (expected.reason, expected.stop_id)
            assert seen == right, f"request {uid} ended with (finish_reason, stop_id) {seen}, expected {right}"
        params = self.requests[uid].params
        if reply.finish_reason in ("stop", "length") and params.prompt_logprobs is not None:
            count = max(len(prompt) - max(params.logprob_start_len, 1), 0)
            seen_count = len(report.prompt_logprobs.get(uid, []))
            assert seen_count == count, f"request {uid} got {seen_count} prompt log-probabilities, expected {count}"
        for name, seen_count, count in (
            ("prompt_tokens", reply.prompt_tokens, len(prompt)),
            ("output_tokens", reply.output_tokens, len(tokens)),
        ):
            assert seen_count == count, f"usage: {name} of request {uid} is {seen_count}, expected {count}"
        assert 0 <= reply.cached_tokens < len(prompt), (
            f"usage: cached_tokens of request {uid} is {reply.cached_tokens}, expected 0 to {len(prompt) - 1}"
        )
        if reply.finish_reason in ("stop", "length") and report.counts.admissions[uid] == 1:
            skipped = len(prompt) + len(tokens) - 1 - report.counts.computed_by[uid]
            # With overlap, the step after the last token may have computed one more position; the last row may
            # have accepted drafts behind a stop token, in several rounds.
            assert 0 <= reply.cached_tokens - skipped <= self.rounds * (1 + self.max_drafts), (
                f"usage: cached_tokens of request {uid} is {reply.cached_tokens}, but {skipped} of its positions were "
                "not computed"
            )


def rejection_reason(spec: EngineSpec, request: SimRequest) -> str:
    """Return why the scheduler must reject the request; empty if there is no reason."""
    longest = len(request.prompt) + request.params.max_tokens
    if len(request.prompt) == 0:
        return "its prompt is empty"
    if longest > spec.max_seq_len:
        return f"prompt and max_tokens are {longest} tokens, and max_seq_len is {spec.max_seq_len}"
    if spec.pages_of(-(-(longest - 1) // spec.page_size)) > spec.num_pages:  # the last output token needs no KV
        return f"it needs KV for {longest - 1} tokens, and the pool has {spec.num_pages} pages"
    if min(request.prompt) < 0 or max(request.prompt) >= spec.vocab_size:
        return f"a prompt token is not in the vocabulary of {spec.vocab_size} tokens"
    try:
        request.params.check(spec.vocab_size)
    except InvalidRequestError as error:
        return error.message
    return ""


def surely_fits(spec: EngineSpec, request: SimRequest) -> bool:
    """Return whether the pool has room even for the KV of the last output token, which is never computed."""
    tokens = len(request.prompt) + request.params.max_tokens
    return spec.pages_of(-(-tokens // spec.page_size)) <= spec.num_pages


def drive(jobs: Iterable[Job], spec: EngineSpec, cache: PrefixCache, policy: SchedulerPolicy, **options: Any) -> Report:
    """Run ``jobs`` through the real scheduler to the end, with all checks of `Drive`, and return the report.

    ``options`` are `Drive`'s.
    """
    return Drive(spec, cache, policy, **options).run(jobs)
