"""`speculation=ngram` against a search through the whole list of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import pytest

from minisgl.core import Req
from minisgl.plugins.speculation.ngram import NgramProposer
from minisgl.testing.proposer import running_request


def searched(tokens: Sequence[int], match_tokens: int, unread: int, limit: int) -> Iterator[list[int]]:
    """Yield copies of what followed the latest earlier occurrence of the last tokens: of the longest group first.

    The next group is half as long. One token counts only where the text repeats pairs of tokens.
    """
    size = match_tokens
    while size:
        last = list(tokens[len(tokens) - size :])
        ends = [end for end in range(size, len(tokens)) if list(tokens[end - size : end]) == last]
        if ends and (size > 1 or match_tokens == 1 or repeats(tokens)):
            copied = list(tokens)
            for _ in range(unread + limit):
                copied.append(copied[ends[-1] + len(copied) - len(tokens)])
            yield copied[len(tokens) + unread :]
        size //= 2
    yield []


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether at least 5 % of the tokens also followed the latest earlier occurrence of the token before."""
    count, after = 0, dict[int, int]()
    for before, token in pairwise(tokens):
        count += after.get(before) == token
        after[before] = token
    return count >= 0.05 * len(tokens)


@pytest.mark.parametrize("match_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("vocabulary", [2, 5, 30, 1000])
def test_drafts_are_those_of_a_search(match_tokens: int, vocabulary: int) -> None:
    """Requests of several lengths come, gain one or several tokens, and leave their rows to others."""
    random = Random(match_tokens * 1000 + vocabulary)
    proposer = NgramProposer(rows=5, columns=400, max_drafts=6, match_tokens=match_tokens)
    reqs: list[Req] = []
    found = missed = 0
    for uid in range(200):
        if len(reqs) == 5:
            left = reqs.pop(random.randrange(5))
            proposer.removed(left)
        row = next(i for i in range(5) if i not in [req.req_pool_idx for req in reqs])
        stem = [random.randrange(vocabulary) for _ in range(random.randint(1, 12))]
        reqs.append(running_request(uid, stem * random.randint(1, 4), row))
        if random.random() < 0.3:
            reqs[-1].output_ids.extend(stem)  # it was retracted, and runs again
        proposer.admitted(reqs[-1])
        for _ in range(3):
            gaining = random.sample(reqs, random.randint(1, len(reqs)))
            runs = [[random.randrange(vocabulary) for _ in range(random.randint(1, 4))] for _ in gaining]
            for req, run in zip(gaining, runs, strict=True):
                req.output_ids.extend(run)
            proposer.advanced(gaining, runs)
            unread = [random.randint(0, 1) for _ in reqs]
            limits = [random.randint(0, 6) for _ in reqs]
            drafts = proposer.propose(reqs, [len(r) + u for r, u in zip(reqs, unread, strict=True)], limits)
            for req, pending, limit, drafted in zip(reqs, unread, limits, drafts, strict=True):
                wanted = list(searched(req.tokens().tolist(), match_tokens, pending, limit))
                assert list(drafted) in wanted  # an entry of the hash table may be another group's
                found, missed = found + bool(drafted), missed + (list(drafted) != wanted[0])
    assert found > 50 or vocabulary == 1000
    assert missed <= found / 20


@pytest.mark.parametrize(("max_drafts", "match_tokens"), [(0, 3), (4, 0)])
def test_wrong_options(max_drafts: int, match_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        NgramProposer(4, 100, max_drafts, match_tokens)
