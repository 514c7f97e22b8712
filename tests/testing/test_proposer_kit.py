"""The kit for proposers: the shipped ones pass, and the kit finds a wrong proposer for each of its rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from minisgl.core import EngineSpec, Req, SamplingParams
from minisgl.plugins.speculation import DraftProposer
from minisgl.plugins.speculation.grammar import GrammarProposer
from minisgl.plugins.speculation.ngram import NgramProposer
from minisgl.plugins.speculation.none import NoProposer
from minisgl.plugins.speculation.suffix import SuffixProposer
from minisgl.testing.drive import Job
from minisgl.testing.proposer import ProposalChecker, ProposerConformance


class TestNone(ProposerConformance):
    def make(self, spec: EngineSpec) -> DraftProposer:
        return NoProposer()


class TestNgram(ProposerConformance):
    def make(self, spec: EngineSpec) -> DraftProposer:
        return NgramProposer(spec.max_running_requests, spec.max_seq_len + 1, max_drafts=5, match_tokens=2)


class TestSuffix(ProposerConformance):
    def make(self, spec: EngineSpec) -> DraftProposer:
        return suffix(spec)


class TestGrammar(ProposerConformance):
    """Beside another proposer; the requests of the kit have no grammars."""

    def make(self, spec: EngineSpec) -> DraftProposer:
        return GrammarProposer(4, suffix(spec))


def suffix(spec: EngineSpec) -> SuffixProposer:
    return SuffixProposer(spec.max_running_requests, spec.max_seq_len + 1, 7, match_tokens=1, max_tokens=4_000)


class Right(DraftProposer):
    """A correct proposer: the last token again, as often as it may. It notes the rows of running requests."""

    max_drafts = 3

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.last: dict[int, int] = {}  # row → token

    def admitted(self, req: Req) -> None:
        self.last[req.req_pool_idx] = int(req.tokens()[-1])

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        for req, run in zip(reqs, tokens, strict=True):
            self.last[req.req_pool_idx] = run[-1]

    def removed(self, req: Req) -> None:
        del self.last[req.req_pool_idx]

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [[self.last[req.req_pool_idx]] * min(3, limit) for req, limit in zip(reqs, limits, strict=True)]


class TooFewRuns(Right):
    """Returns no entry for requests without drafts."""

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [run for run in super().propose(reqs, positions, limits) if run][1:]


class OverLimit(Right):
    """Ignores the limits."""

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return super().propose(reqs, positions, [9] * len(reqs))


class OutsideVocabulary(Right):
    """Drafts a token behind the vocabulary."""

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [[token + 1 for token in run] for run in super().propose(reqs, positions, limits)]


class NotInteger(Right):
    """Drafts floats."""

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [[float(token) for token in run] for run in super().propose(reqs, positions, limits)]  # type: ignore[misc]


class Counting(Right):
    """Drafts something else when it is asked again."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.asked = 0

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        self.asked += 1
        return [run[: self.asked % 3] for run in super().propose(reqs, positions, limits)]


class Numbered(Right):
    """Drafts something that depends on the object, as a random number without a seed does."""

    numbers = count()

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.number = next(Numbered.numbers)

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [[self.number % 2] * min(2, limit) for limit in limits]


class ChangesTheRequest(Right):
    """Appends its drafts to the output."""

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = super().propose(reqs, positions, limits)
        for req, run in zip(reqs, drafts, strict=True):
            req.output_ids.extend(run)
        return drafts


class KeepsRequests(Right):
    """Never forgets a request."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.seen: list[Req] = []

    def admitted(self, req: Req) -> None:
        super().admitted(req)
        self.seen.append(req)


class FirstAdmissionOnly(Right):
    """Knows a request by its uid, and expects to be told of it once."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.uids: set[int] = set()

    def admitted(self, req: Req) -> None:
        if req.uid in self.uids:
            raise LookupError(f"request {req.uid} was admitted before")
        self.uids = set(list(self.uids)[-20:]) | {req.uid}
        super().admitted(req)


class PromptOnly(Right):
    """Expects that a request has no output when it is admitted."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.lengths: dict[int, int] = {}

    def admitted(self, req: Req) -> None:
        super().admitted(req)
        self.lengths[req.req_pool_idx] = len(req.prompt_ids)

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        super().advanced(reqs, tokens)
        for req, run in zip(reqs, tokens, strict=True):
            self.lengths[req.req_pool_idx] += len(run)
            if self.lengths[req.req_pool_idx] != len(req):
                raise LookupError("the output began somewhere else")


class RemovedWithOutput(Right):
    """Expects that a request has output when it is removed, which an aborted one may not have."""

    def removed(self, req: Req) -> None:
        super().removed(req)
        assert req.output_ids[-1] >= 0


class RowsOnce(Right):
    """Keeps what it knows of a row, and does not expect another request in it."""

    def removed(self, req: Req) -> None:
        pass

    def admitted(self, req: Req) -> None:
        if req.req_pool_idx in self.last:
            raise LookupError("a row twice")
        super().admitted(req)


class OneSalt(SuffixProposer):
    """Uses earlier answers whatever the salt of the request is."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec.max_running_requests, spec.max_seq_len + 1, 20, 1, 4_000)

    def admitted(self, req: Req) -> None:
        super().admitted(req)
        self._salts[req.req_pool_idx] = 0


class IntoTheNextAnswer(OneSalt):
    """Looks up answers of the right salt, but a draft may run on past the end of one into the next."""

    def admitted(self, req: Req) -> None:
        SuffixProposer.admitted(self, req)

    def removed(self, req: Req) -> None:
        super().removed(req)
        self._head -= 1  # no separator


class StaleRow(NgramProposer):
    """Keeps the groups of the row's earlier request."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec.max_running_requests, spec.max_seq_len + 1, 5, 2)

    def admitted(self, req: Req) -> None:
        row, ids = req.req_pool_idx, req.tokens()
        self._tokens[row, : len(ids)] = ids
        self._lengths[row] = len(ids)


class NoNumber(Right):
    """Has no whole number of drafts."""

    max_drafts = 2.5  # type: ignore[assignment]


def kit_of(make: Any) -> Any:
    return type("Kit", (ProposerConformance,), {"make": lambda self, spec: make(spec), "runs": 20})()


class TestRight(ProposerConformance):
    def make(self, spec: EngineSpec) -> DraftProposer:
        return Right(spec)


@pytest.mark.parametrize(
    ("wrong", "where", "message"),
    [
        (TooFewRuns, "test_one_request", "propose() returned 0 runs for 1 requests"),
        (OverLimit, "test_random_requests", "its limit is"),
        (OutsideVocabulary, "test_random_requests", "not in the vocabulary"),
        (NotInteger, "test_one_request", "not an integer"),
        (Counting, "test_one_request", "asked twice"),
        (Numbered, "test_one_request", "after the same calls"),
        (ChangesTheRequest, "test_one_request", "tokens of"),
        (KeepsRequests, "test_memory", "bytes more are allocated"),
        (FirstAdmissionOnly, "test_retraction", "was admitted before"),
        (PromptOnly, "test_retraction", "began somewhere else"),
        (RemovedWithOutput, "test_aborts", "list index out of range"),
        (RowsOnce, "test_row_reuse", "a row twice"),
        (OneSalt, "test_salts", "tokens of a request with cache_salt='a'"),
        (IntoTheNextAnswer, "test_salts", "tokens of a request with cache_salt='a'"),
        (StaleRow, "test_salts", "tokens of a request with cache_salt='a'"),
        (NoNumber, "test_max_drafts", "expected an integer"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_wrong_proposers(wrong: type, where: str, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        getattr(kit_of(wrong), where)()
    assert caught.type in (AssertionError, LookupError, IndexError)


def test_shipped_proposers_draft_in_the_kit() -> None:
    """The requests of the kit repeat themselves, so that there is something to check."""
    spec = EngineSpec(page_size=4, num_pages=40, max_running_requests=4, max_seq_len=160, vocab_size=5)
    for kit in (TestNgram(), TestSuffix()):
        params = SamplingParams(max_tokens=60, temperature=0)
        checker, report = kit.drive([Job(uid, [0, 1, 2, 3] * 2, params, 9 * uid) for uid in range(6)], spec)
        assert checker.num_drafts > report.counts.accepted_drafts > 20


def test_wrong_calls_are_found() -> None:
    """The checker also finds a scheduler that calls a proposer in the wrong order."""
    spec = EngineSpec(page_size=4, num_pages=40, max_running_requests=4, max_seq_len=160, vocab_size=50)
    req = Req(1, [1, 2, 3], SamplingParams(), 0)
    checker = ProposalChecker(Right(spec), Right(spec), 50)
    with pytest.raises(AssertionError, match="a row that is not free"):
        checker.admitted(req)
    req.req_pool_idx = 2
    with pytest.raises(AssertionError, match="does not run"):
        checker.advanced([req], [[1]])
    with pytest.raises(AssertionError, match="does not run"):
        checker.removed(req)
    checker.admitted(req)
    with pytest.raises(AssertionError, match="runs already"):
        checker.admitted(req)
    with pytest.raises(AssertionError, match="differ from those"):
        checker.advanced([req], [[1]])
    with pytest.raises(AssertionError, match="never removed"):
        checker.check_all_removed()
