"""What `speculation=ngram` and `suffix` have in common: no drafts on random text, and the cost of a turn."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from minisgl.plugins.speculation import DraftProposer
from minisgl.plugins.speculation.ngram import NgramProposer
from minisgl.plugins.speculation.suffix import SuffixProposer
from minisgl.testing.proposer import running_request


def ngram(rows: int, columns: int) -> NgramProposer:
    return NgramProposer(rows, columns, max_drafts=8, match_tokens=4)


def suffix(rows: int, columns: int) -> SuffixProposer:
    """Build a proposer that knows the text of 50 earlier requests, which ran in row 0."""
    rng = np.random.default_rng(0)
    proposer = SuffixProposer(rows, columns, max_drafts=8, match_tokens=3, max_tokens=1_000_000)
    for uid in range(50):
        req = running_request(uid, rng.integers(0, 30, 50).tolist(), 0)
        proposer.admitted(req)
        for token in rng.integers(0, 30, 100).tolist():
            req.output_ids.append(token)
            proposer.advanced([req], [[token]])
        proposer.removed(req)
    return proposer


pytestmark = pytest.mark.parametrize("make", [ngram, suffix])


def test_random_text_gets_no_drafts(make: Callable[[int, int], DraftProposer]) -> None:
    rng = np.random.default_rng(0)
    proposer = make(1, 20_000)
    req = running_request(0, rng.integers(0, 150_000, 16_000), 0)
    proposer.admitted(req)
    for _ in range(200):
        req.output_ids.append(int(rng.integers(0, 150_000)))
        proposer.advanced([req], [req.output_ids[-1:]])
        assert not any(proposer.propose([req], [len(req)], [8]))


def test_cost_of_a_turn(make: Callable[[int, int], DraftProposer]) -> None:
    """A turn of 256 requests of 16,384 tokens takes about as long as one of 256 short ones: well under 5 ms."""
    rng = np.random.default_rng(0)
    proposer = make(256, 17_000)
    reqs = [running_request(i, rng.integers(0, 30, 16_384), i) for i in range(256)]
    for req in reqs:
        proposer.admitted(req)
    limits, tokens = [8] * 256, rng.integers(0, 30, (40, 256)).tolist()
    times = []
    for turn in tokens:
        for req, token in zip(reqs, turn, strict=True):
            req.output_ids.append(token)
        start = time.thread_time()
        proposer.advanced(reqs, [[token] for token in turn])
        proposer.propose(reqs, [len(req) for req in reqs], limits)
        times.append(time.thread_time() - start)
    print(f"{min(times) * 1e6:.0f} µs a turn")
    assert min(times) < 0.005
