"""A conformance kit for proposers of drafts: random requests, through the real scheduler, on the simulated engine.

A proposer may be wrong about every token. It must not cause a wrong output, must keep its drafts within limits and
vocabulary, must depend on nothing but the calls that it gets, must forget a request that was removed, and must not
draft the text of a request for a request with another ``cache_salt``. The kit uses `minisgl.scheduler.base` and no
shipped proposer.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from minisgl.core import EngineSpec, Req, SamplingParams
from minisgl.plugins.speculation import DraftProposer
from minisgl.testing.drive import Drive, Job, Report, make_plugin
from minisgl.testing.small import no_lookahead

__all__ = ["ProposalChecker", "ProposerConformance", "running_request"]


class ProposalChecker(DraftProposer):
    """Passes all calls on to two equal proposers, and checks the drafts, and the calls themselves.

    The drafts are those of ``first``. They must be the same if it is asked twice, and those of ``second``, which gets
    the same calls. ``num_drafts`` counts them.
    """

    def __init__(self, first: DraftProposer, second: DraftProposer, vocab_size: int):
        self.first, self.second, self.vocab_size = first, second, vocab_size
        self.max_drafts, self.costly = first.max_drafts, first.costly
        self.num_drafts = 0
        self._running: dict[int, tuple[int, list[int]]] = {}  # uid → request-pool row, tokens

    def admitted(self, req: Req) -> None:
        rows = [row for row, _ in self._running.values()]
        assert req.uid not in self._running, f"{req} was admitted, although it runs already"
        assert req.req_pool_idx >= 0 and req.req_pool_idx not in rows, f"{req} was admitted to a row that is not free"
        self._running[req.uid] = req.req_pool_idx, req.tokens().tolist()
        self.first.admitted(req)
        self.second.admitted(req)
        self._check_unchanged([req])

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        assert len({req.uid for req in reqs}) == len(reqs) == len(tokens)
        for req, run in zip(reqs, tokens, strict=True):
            assert req.uid in self._running, f"{req} gained tokens, but does not run"
            assert run, f"{req} advanced by no token"
            self._running[req.uid][1].extend(run)
        self._check_unchanged(reqs)
        self.first.advanced(reqs, tokens)
        self.second.advanced(reqs, tokens)
        self._check_unchanged(reqs)

    def removed(self, req: Req) -> None:
        assert req.uid in self._running, f"{req} was removed, but does not run"
        self._check_unchanged([req])
        self.first.removed(req)
        self.second.removed(req)
        self._check_unchanged([req])
        del self._running[req.uid]

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        for req, position in zip(reqs, positions, strict=True):
            assert req.uid in self._running, f"drafts were asked for {req}, which does not run"
            assert 0 <= position - len(req) <= 1, f"{req} was asked for position {position}"
        drafts: Sequence[Sequence[int]] = self.first.propose(reqs, list(positions), list(limits))
        again = self.first.propose(reqs, list(positions), list(limits))
        other = self.second.propose(reqs, list(positions), list(limits))
        self._check_unchanged(reqs)
        self._check_drafts(reqs, limits, drafts)
        plain, repeated, others = ([list(run) for run in part] for part in (drafts, again, other))
        assert plain == repeated, f"asked twice, propose() returned {plain} and then {repeated}"
        assert plain == others, f"after the same calls, two proposers returned {plain} and {others}"
        self.num_drafts += sum(map(len, drafts))
        return drafts

    def close(self) -> None:
        self.first.close()
        self.second.close()

    def _check_drafts(self, reqs: Sequence[Req], limits: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        assert len(drafts) == len(reqs), f"propose() returned {len(drafts)} runs for {len(reqs)} requests"
        for req, limit, run in zip(reqs, limits, drafts, strict=True):
            assert len(run) <= limit, f"{req} got {len(run)} drafts; its limit is {limit}"
            for token in run:
                whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
                assert whole, f"{req} got the draft {token!r}, which is not an integer"
                assert 0 <= token < self.vocab_size, f"{req} got the draft {token}, which is not in the vocabulary"

    def _check_unchanged(self, reqs: Iterable[Req]) -> None:
        for req in reqs:
            row, tokens = self._running[req.uid]
            assert req.req_pool_idx == row, f"the request-pool row of {req} was {row}, and changed"
            assert req.tokens().tolist() == tokens, f"the tokens of {req} differ from those that it was said to have"

    def check_all_removed(self) -> None:
        """Raise AssertionError if a request was admitted and not removed."""
        assert not self._running, f"requests {sorted(self._running)} were never removed"


class ProposerConformance:
    """The tests that every proposer must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, and implement `make`. A proposer
    that learns from earlier requests must keep no more than about 4,000 tokens of them here.
    """

    runs = 40
    """Number of runs with random requests. Later runs have more requests."""
    salt_runs = 4
    """Number of runs of `test_salts` with each pair of salts."""
    max_steps = 5_000
    """Steps within which all requests of a run must finish."""

    def make(self, spec: EngineSpec) -> DraftProposer:
        """Build a new object of your proposer, for an engine of the sizes ``spec``."""
        raise NotImplementedError("make(self, spec) must return a new object of the proposer to test")

    @staticmethod
    def traced(proposer: DraftProposer) -> AbstractContextManager[Callable[[], int]]:
        """Trace memory allocations, and yield a function that returns the number of bytes that are allocated now.

        A subclass whose proposer is in another process replaces it.
        """
        return _traced()

    def drive(
        self, jobs: Sequence[Job], spec: EngineSpec, cache: str = "radix", retract: bool = False, **options: Any
    ) -> tuple[ProposalChecker, Report]:
        """Serve the requests ``jobs``. Return the `ProposalChecker` around the proposer, and the report.

        Raise AssertionError if an output is wrong, a rule is broken, or a request does not finish within ``max_steps``
        steps. With ``retract``, admission keeps no pages free, so requests are retracted where the pool is small.
        """
        checker = ProposalChecker(self.make(spec), self.make(spec), spec.vocab_size)
        plugins = make_plugin("cache", cache, page_size=spec.page_size), make_plugin("scheduler", "mixed")
        with no_lookahead() if retract else nullcontext():
            drive = Drive(spec, *plugins, proposer=checker, thorough=False, **options)
            report = drive.run(jobs, max_steps=self.max_steps)
        checker.check_all_removed()
        return checker, report

    def test_max_drafts(self) -> None:
        """``max_drafts`` is a whole number that does not change, and at least 0."""
        proposer = self.make(_SPEC)
        most = proposer.max_drafts
        assert isinstance(most, int) and not isinstance(most, bool), f"max_drafts is {most!r}, expected an integer"
        assert most >= 0, f"max_drafts is {most}, expected at least 0"

    def test_one_request(self) -> None:
        """A single request finishes with the right tokens, with and without overlap."""
        for overlap in (False, True):
            for length, answer in ((1, 1), (1, 30), (30, 60)):
                self.drive([_job(1, length, answer)], _SPEC, overlap=overlap)

    def test_row_reuse(self) -> None:
        """20 requests finish with the right tokens if at most 4 can run at a time; many are alike."""
        for overlap in (False, True):
            jobs = [_job(uid, 3 + uid % 5, 12, first=uid % 3, arrive=uid // 3) for uid in range(1, 21)]
            self.drive(jobs, _SPEC, overlap=overlap)

    def test_retraction(self) -> None:
        """Requests that are retracted and run again, with their output, finish with the right tokens."""
        for overlap in (False, True):
            for max_running_requests in (3, 5):
                spec = EngineSpec(4, 16, max_running_requests, max_seq_len=64, vocab_size=5)
                jobs = [_job(uid, 6, 40, vocabulary=5) for uid in range(1, 9)]
                _, report = self.drive(jobs, spec, "naive", retract=True, overlap=overlap)
                assert report.retractions, "no request was retracted"

    def test_aborts(self) -> None:
        """Requests that are aborted while they wait, in their prompt, and while they decode."""
        for overlap in (False, True):
            for shift in range(0, 6, 2):
                jobs = [_job(uid, 9, 30, arrive=uid // 3) for uid in range(1, 13)]
                jobs = [replace(j, abort=j.arrive + (j.uid + shift) % 6) if j.uid % 4 else j for j in jobs]
                self.drive(jobs, _SPEC, overlap=overlap, max_prefill_tokens=12)

    def test_random_requests(self) -> None:
        """Random requests finish with the right tokens.

        The runs have shared prefixes, repeated prompts, aborted requests, small pools and chunks of different sizes,
        with and without overlap, retraction, a prefix cache, and a number of drafts that follows how many were
        accepted.
        """
        for seed in range(self.runs):
            rng = random.Random(seed)
            size, pages = rng.choice([1, 2, 4, 7]), rng.randint(6, 24)
            room, vocabulary = size * pages, rng.choice([2, 5, 50])
            spec = EngineSpec(size, pages, rng.randint(1, 5), max_seq_len=room, vocab_size=vocabulary)
            jobs = [_any_job(rng, uid, room, vocabulary) for uid in range(1, 2 + min(seed, 10))]
            self.drive(
                jobs,
                spec,
                rng.choice(["radix", "naive"]),
                retract=rng.random() < 0.5,
                overlap=rng.random() < 0.5,
                max_prefill_tokens=rng.choice([1, 3, 8, 8192]),
                adapt_drafts=rng.random() < 0.5,
            )

    def test_memory(self) -> None:
        """Nothing of a removed request stays: after many requests, 300 more need no more memory."""
        proposer = self.make(_SPEC)
        if not proposer.max_drafts:
            return
        with self.traced(proposer) as allocated:
            _serve(proposer, range(150))
            before = allocated()
            _serve(proposer, range(150, 450))
            growth = allocated() - before
        assert growth < 64 * 1024, f"300 requests came and went, and {growth} bytes more are allocated"

    def test_salts(self) -> None:
        """A request gets no tokens of a request with another salt, be it one that runs, or ran in the same row."""
        for theirs, own in (("a", "b"), ("a", None), (None, "b")):
            for seed in range(self.salt_runs):
                self._check_salts(random.Random(seed), theirs, own)

    def _check_salts(self, rng: random.Random, theirs: str | None, own: str | None) -> None:
        """Compare with a proposer that never sees the requests with the salt ``theirs``.

        Their answers have tokens from 30 on, those with the salt ``own`` have none of these.
        """
        both, alone = self.make(_SPEC), self.make(_SPEC)
        if not both.max_drafts:
            return
        running: list[Req] = []
        for uid in range(60):
            if len(running) == _SPEC.max_running_requests:
                left = running.pop(rng.randrange(len(running)))
                both.removed(left)
                if left.params.cache_salt == own:
                    alone.removed(left)
            row = min(set(range(_SPEC.max_running_requests)) - {req.req_pool_idx for req in running})
            prompt = [1, 2, 3, 4, 5, 6, 7, 8][uid % 3 :]
            running.append(running_request(uid, prompt, row, rng.choice([theirs, own]), max_tokens=120))
            both.admitted(running[-1])
            if running[-1].params.cache_salt == own:
                alone.admitted(running[-1])
                self._compare([running[-1]], both, alone, theirs)
            for _ in range(rng.randint(1, 4)):
                some = [req for req in running if len(req) < 100]
                runs = [_continued(req, 10 if req.params.cache_salt == own else 30) for req in some]
                for req, run in zip(some, runs, strict=True):
                    req.output_ids.extend(run)
                both.advanced(some, runs)
                kept = [(req, run) for req, run in zip(some, runs, strict=True) if req.params.cache_salt == own]
                if kept:
                    alone.advanced([req for req, _ in kept], [run for _, run in kept])
                    self._compare([req for req, _ in kept], both, alone, theirs)

    def _compare(self, reqs: list[Req], both: DraftProposer, alone: DraftProposer, theirs: str | None) -> None:
        """Check that the drafts of the requests have no tokens of a request with the salt ``theirs``."""
        positions, limits = [len(req) for req in reqs], [both.max_drafts] * len(reqs)
        seen, expected = (part.propose(reqs, positions, limits) for part in (both, alone))
        for req, run, other in zip(reqs, seen, expected, strict=True):
            leaked = [token for token in run if token >= 30]
            assert not leaked or list(run) == list(other), (
                f"{req} with cache_salt={req.params.cache_salt!r} got the drafts {list(run)}; {leaked} are tokens of a "
                f"request with cache_salt={theirs!r}"
            )


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


_SPEC = EngineSpec(page_size=4, num_pages=40, max_running_requests=4, max_seq_len=160, vocab_size=50)


def _continued(req: Req, first: int) -> list[int]:
    """Return the next tokens of a made-up answer, from ``first`` on: a few, which are the same in all requests."""
    k = len(req.output_ids)
    return [first + (k + i) % 15 for i in range(1 + k % 3)]


def running_request(uid: int, prompt: Sequence[int], row: int, salt: str | None = None, max_tokens: int = 1000) -> Req:
    """Return a request that runs in request-pool row ``row`` and has no output yet."""
    req = Req(uid, np.asarray(prompt, np.int32), SamplingParams(max_tokens=max_tokens, cache_salt=salt), uid)
    req.req_pool_idx = row
    return req


def _serve(proposer: DraftProposer, uids: Iterable[int]) -> None:
    """Let requests of 32 tokens come and go, some retracted once, in the rows of the engine."""
    rows = _SPEC.max_running_requests
    for uid in uids:
        rng = random.Random(uid)
        prompt = np.array([rng.randrange(50) for _ in range(16)], np.int32)
        req = Req(uid, prompt, SamplingParams(max_tokens=100, cache_salt=rng.choice([None, "a", str(uid)])), uid)
        for _ in range(1 + uid % 2):
            req.req_pool_idx = uid % rows
            proposer.admitted(req)
            for _ in range(2):
                run = [rng.randrange(50) for _ in range(rng.randint(1, 6))]
                req.output_ids.extend(run)
                proposer.advanced([req], [run])
                proposer.propose([req], [len(req) + rng.randint(0, 1)], [proposer.max_drafts])
            proposer.removed(req)
            req.req_pool_idx = -1


def _job(uid: int, length: int, answer: int, first: int | None = None, vocabulary: int = 50, **more: Any) -> Job:
    start = uid * 7 if first is None else first
    prompt = [(start + i * i) % vocabulary for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), **more)


def _any_job(rng: random.Random, uid: int, room: int, vocabulary: int) -> Job:
    answer = rng.randint(1, max(room // 2, 1))
    length = rng.randint(1, max(room - answer, 1))
    arrive = rng.choice([0, 0, 1, 4, 9, 30])
    abort = arrive + rng.randint(0, 12) if rng.random() < 0.2 else None
    count = min(answer, room - length) or 1
    made = _job(uid, length, count, rng.choice([0, uid]), vocabulary, arrive=arrive, abort=abort)
    params = SamplingParams(
        max_tokens=count,
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.choice([None, 3]),
        cache_salt=rng.choice([None, None, "a", "b"]),
        stop_token_ids=rng.choice([(), (), (1,)]),
    )
    return replace(made, params=params)
