"""`speculation=suffix` against a search through whole texts, its memory, and its privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from minisgl.core import Req
from minisgl.plugins.speculation.suffix import SuffixProposer
from minisgl.testing.proposer import running_request


def proposer_of(rows: int = 5, max_tokens: int = 100_000, match_tokens: int = 3, columns: int = 1000) -> SuffixProposer:
    return SuffixProposer(rows, columns, max_drafts=8, match_tokens=match_tokens, max_tokens=max_tokens)


def equal_before(a: Sequence[int], i: int, b: Sequence[int], j: int, most: int) -> int:
    """Return how many tokens before index i of a and index j of b are equal, at most ``most``."""
    count = 0
    while count < min(i, j, most) and a[i - 1 - count] == b[j - 1 - count]:
        count += 1
    return count


@dataclass
class Search:
    """What the proposer knows, as lists that are searched from end to end."""

    match_tokens: int
    answers: list[tuple[str | None, list[int], int]] = field(default_factory=list)  # salt, tokens, first known end
    known: dict[int, int] = field(default_factory=dict)  # uid → tokens when it was admitted

    @property
    def longest(self) -> int:
        return 8 * self.match_tokens

    def admitted(self, req: Req) -> None:
        self.known[req.uid] = len(req)

    def removed(self, req: Req) -> None:
        begin = self.known.pop(req.uid)
        if begin < len(req):
            first = max(0, begin - self.longest)
            self.answers.append((req.params.cache_salt, req.tokens().tolist()[first:], max(begin - first, 1)))

    def ends(self, req: Req) -> list[list[tuple[int, list[int], int]]]:
        """Return (length, text, end) of every match, the latest first: in the request, and in earlier answers."""
        own = req.tokens().tolist()
        texts = [[(own, 1)], [(t, first) for salt, t, first in self.answers if salt == req.params.cache_salt][::-1]]
        return [
            [
                (length, text, end)
                for text, first in part
                for end in range(len(text) - 1, first - 1, -1)
                if (length := equal_before(text, end, own, len(own), self.longest)) >= self.match_tokens
            ]
            for part in texts
        ]

    def drafts(self, req: Req, unread: int, limit: int) -> tuple[list[int], int, set[tuple[int, ...]]]:
        """Return the drafts, the longest length of a match, and all drafts that are a copy after any match."""
        own, earlier = self.ends(req)
        sizes = [self.match_tokens * 2**level for level in range(4)]
        places = [next((m for m in part if m[0] >= size), (0, [0], 0)) for part in (own, earlier) for size in sizes]
        best = max(places, key=lambda m: m[0])  # of equal ones, the first
        copies = {tuple(self.copy(req, *m, unread, limit)) for m in own + earlier}
        return self.copy(req, *best, unread, limit), max((m[0] for m in own + earlier), default=0), copies

    def copy(self, req: Req, length: int, text: list[int], end: int, unread: int, limit: int) -> list[int]:
        if not length:
            return []
        copied = text[end:]
        if text == req.tokens().tolist():
            copied = copied * 9  # an overlapping match repeats itself
        return copied[:9][unread : unread + min(length, limit, 8)]


@pytest.mark.parametrize("match_tokens", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [2, 5, 1000])
def test_drafts_are_those_of_a_search(match_tokens: int, vocabulary: int) -> None:
    """Requests with and without a salt come, gain tokens, are retracted, end, and leave their rows to others."""
    random = Random(match_tokens * 1000 + vocabulary)
    proposer, search = proposer_of(match_tokens=match_tokens), Search(match_tokens)
    stems = [[random.randrange(vocabulary) for _ in range(random.randint(3, 40))] for _ in range(8)]
    reqs: list[Req] = []
    found = missed = halves = 0
    for uid in range(40):
        if len(reqs) == 5:
            left = reqs.pop(random.choice([0, 0, random.randrange(5)]))
            proposer.removed(left)
            search.removed(left)
        row = next(i for i in range(5) if i not in [req.req_pool_idx for req in reqs])
        prompt = random.choice(stems)[: random.randint(1, 40)] * random.randint(1, 2)
        reqs.append(running_request(uid, prompt, row, random.choice([None, "a", "b"])))
        if random.random() < 0.3:
            reqs[-1].output_ids.extend(random.choice(stems))  # it was retracted, and runs again
        proposer.admitted(reqs[-1])
        search.admitted(reqs[-1])
        for _ in range(4):
            gaining = random.sample(reqs, random.randint(1, len(reqs)))
            runs = [random.choice([random.choice(stems)[:20], [random.randrange(vocabulary)]]) for _ in gaining]
            for req, run in zip(gaining, runs, strict=True):
                req.output_ids.extend(run)
            proposer.advanced(gaining, runs)
            unread = [random.randint(0, 1) for _ in reqs]
            limits = [random.randint(0, 8) for _ in reqs]
            drafts = proposer.propose(reqs, [len(r) + u for r, u in zip(reqs, unread, strict=True)], limits)
            for req, pending, limit, drafted in zip(reqs, unread, limits, drafts, strict=True):
                wanted, longest, copies = search.drafts(req, pending, limit)
                assert not drafted or tuple(drafted) in copies
                found, missed = found + bool(drafted), missed + (list(drafted) != wanted)
                halves += len(drafted) < min(limit, longest // 2) and not pending
    assert found > 100
    assert missed <= found / 20  # an entry of a hash table may be another group's
    assert halves <= found / 2  # an answer may end after fewer tokens


def answered(proposer: SuffixProposer, uid: int, prompt: list[int], answer: list[int], salt: str | None = None) -> None:
    """Let a request run in row 0, one token a turn, and end."""
    req = running_request(uid, prompt, 0, salt)
    proposer.admitted(req)
    for token in answer:
        req.output_ids.append(token)
        proposer.advanced([req], [[token]])
    proposer.removed(req)


def drafts_of(proposer: SuffixProposer, prompt: list[int], salt: str | None = None, unread: int = 0) -> list[int]:
    """Return the drafts of a new request in row 1, which then is removed without an answer."""
    req = running_request(999, prompt, 1, salt)
    proposer.admitted(req)
    (drafts,) = proposer.propose([req], [len(prompt) + unread], [8])
    proposer.removed(req)
    return list(drafts)


PROMPT, ANSWER = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def test_the_same_question_again() -> None:
    """The whole prompt matches, so there are as many drafts as it has tokens; later the match is longer."""
    proposer = proposer_of()
    answered(proposer, 0, PROMPT, ANSWER)
    assert drafts_of(proposer, PROMPT) == ANSWER[:5]
    assert drafts_of(proposer, PROMPT, unread=1) == ANSWER[1:6]
    assert drafts_of(proposer, PROMPT[-3:]) == ANSWER[:3]
    assert drafts_of(proposer, PROMPT[-2:]) == []
    assert drafts_of(proposer, PROMPT + ANSWER[:2]) == ANSWER[2:9]
    assert drafts_of(proposer, PROMPT + ANSWER[:8]) == ANSWER[8:]  # the answer ended there
    assert drafts_of(proposer, PROMPT + ANSWER) == []


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", None), (None, "a")])
def test_answers_of_another_salt_are_not_used(first: str | None, second: str | None) -> None:
    """Not those of requests that ended, not those that run, and not those that ran in the same row."""
    proposer = proposer_of()
    answered(proposer, 0, PROMPT, ANSWER, first)
    beside = running_request(1, PROMPT + ANSWER, 2, first)
    proposer.admitted(beside)
    for ahead in range(9):
        assert drafts_of(proposer, PROMPT + ANSWER[:ahead], second) == []
        assert drafts_of(proposer, PROMPT + ANSWER[:ahead], first) != []


def test_drafts_never_run_into_the_next_answer() -> None:
    """The answer of another user stands behind one's own in the ring."""
    proposer = proposer_of()
    for uid in range(20):
        answered(proposer, uid, PROMPT, ANSWER[: 1 + uid % 3], "ab"[uid % 2])
        answered(proposer, 50 + uid, [30] * 6, [31] * 4, "c")
        for salt in "ab":
            for unread in (0, 1):
                for ahead in range(4):
                    drafts = drafts_of(proposer, PROMPT + ANSWER[:ahead], salt, unread)
                    assert set(drafts) <= set(ANSWER[:3])


@pytest.mark.parametrize("max_tokens", [0, 1, 30, 64, 200])
def test_oldest_answers_are_forgotten(max_tokens: int) -> None:
    """Whatever is overwritten, no draft is another salt's; the last answers are known, and older ones are not."""
    random = Random(max_tokens)
    proposer = proposer_of(max_tokens=max_tokens)
    sizes = [array.nbytes for array in vars(proposer).values() if isinstance(array, np.ndarray)]
    prompts = {salt: [100 * k + i for i in range(9)] for k, salt in enumerate("abc", 1)}
    for uid in range(300):
        salt = random.choice("abc")
        first = 1000 * (ord(salt) - 96)
        answer = [first + random.randrange(3) for _ in range(random.randint(1, 40))]
        answered(proposer, uid, random.choice([prompts[salt], [7, 8, 9]]), answer, salt)
        for asking in "abc":
            for prompt in (prompts[asking], [7, 8, 9], answer[:5]):
                drafts = drafts_of(proposer, prompt, asking, random.randint(0, 1))
                own = {1000 * (ord(asking) - 96) + k for k in range(3)}
                assert set(drafts) <= own | set(prompt)
                assert max_tokens or set(drafts) <= set(prompt)
    if max_tokens == 200:
        for uid in range(20):
            answered(proposer, uid, [50, 51, 52, uid, uid, uid], ANSWER)
        known = [uid for uid in range(20) if drafts_of(proposer, [uid, uid, uid]) == ANSWER[:3]]
        assert min(known) >= 20 - 200 // 17 - 1  # 17 tokens each: 6 of the prompt, 10 of the answer, and a separator
        assert len(known) >= 9  # an entry of the hash table may be another group's
    assert sizes == [array.nbytes for array in vars(proposer).values() if isinstance(array, np.ndarray)]


def test_a_retracted_answer_is_kept_once() -> None:
    """A request that runs again adds only the tokens that it gained since."""
    proposer = proposer_of(max_tokens=1000)
    req = running_request(0, PROMPT, 0)
    for round_ in range(5):
        proposer.admitted(req)
        if round_ != 3:
            req.output_ids.append(50 + round_)
            proposer.advanced([req], [req.output_ids[-1:]])
        proposer.removed(req)
    texts = proposer._text[proposer._ring + proposer.longest :]
    assert [int((texts == 50 + k).sum()) for k in range(5)] == [4, 3, 2, 0, 1]  # the later ones are context
    assert drafts_of(proposer, [*PROMPT, 50]) == [51]


@pytest.mark.parametrize(
    ("max_drafts", "match_tokens", "max_tokens", "wrong"),
    [(0, 3, 9, "max_drafts"), (4, 0, 9, "match_tokens"), (4, 3, -1, "max_tokens")],
)
def test_wrong_options(max_drafts: int, match_tokens: int, max_tokens: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong} must be at least"):
        SuffixProposer(4, 100, max_drafts, match_tokens, max_tokens)
