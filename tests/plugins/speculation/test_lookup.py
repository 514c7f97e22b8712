"""`speculation=lookup` against a search through the whole text, and the texts of lab `draft`."""

from __future__ import annotations

from random import Random

import pytest

from minisgl.chapters.lab.grader.draft_texts import TEXTS, replay, steps_of, tokens_of
from minisgl.core import EngineSpec
from minisgl.plugins.speculation import DraftProposer
from minisgl.plugins.speculation.lookup import Lookup, LookupProposer
from minisgl.testing.proposer import ProposerConformance, running_request


class TestLookup(ProposerConformance):
    runs = 8

    def make(self, spec: EngineSpec) -> DraftProposer:
        return LookupProposer(max_drafts=5, match_tokens=2)


@pytest.mark.parametrize("match_tokens", [1, 2, 3])
def test_drafts_are_those_of_a_search(match_tokens: int) -> None:
    random = Random(match_tokens)
    found = 0
    for uid in range(40):
        proposer = LookupProposer(6, match_tokens)
        req = running_request(uid, [random.randrange(3) for _ in range(random.randint(1, 8))], 0)
        proposer.admitted(req)
        for _ in range(8):
            tokens, unread, limit = req.tokens().tolist(), random.randint(0, 1), random.randint(0, 6)
            (drafts,) = proposer.propose([req], [len(tokens) + unread], [limit])
            last = tokens[-match_tokens:]
            ends = [i for i in range(match_tokens, len(tokens)) if tokens[i - match_tokens : i] == last]
            expected = list(tokens)
            for _ in range(unread + limit if ends else 0):
                expected.append(expected[ends[-1] + len(expected) - len(tokens)])
            assert drafts == expected[len(tokens) + unread :]
            found += bool(drafts)
            run = [random.randrange(3) for _ in range(random.randint(1, 3))]
            req.output_ids.extend(run)
            proposer.advanced([req], [run])
        proposer.removed(req)
        assert not proposer.texts
    assert found > 50


@pytest.mark.parametrize("options", [{"max_drafts": 0}, {"match_tokens": 0}])
def test_wrong_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Lookup(**options)


def test_texts_of_the_lab() -> None:
    """Copies give more tokens a step than own words, and no draft is ever asked for past the end of an answer."""
    found = steps_of(LookupProposer(8, 3))
    assert list(found) == [text.name for text in TEXTS]
    assert found["own words"].drafts == 0 and found["own words"].steps == found["own words"].tokens
    assert found["edit"].tokens > 2.5 * found["edit"].steps
    assert all(each.tokens == each.steps + each.accepted for each in found.values())


def test_replay_refuses_too_many_drafts() -> None:
    class Many(DraftProposer):
        max_drafts = 2

        def propose(self, reqs, positions, limits):  # type: ignore[no-untyped-def]
            return [[0] * 9 for _ in reqs]

    with pytest.raises(ValueError, match="9 drafts, where 2 are allowed"):
        replay(Many(), *tokens_of(TEXTS[0]))
