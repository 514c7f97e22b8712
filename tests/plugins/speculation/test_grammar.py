"""`speculation=grammar`: forced tokens are drafts; and drafts are cut where a grammar forbids them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.core import I32, Req
from minisgl.plugins.constraint.base import Constraint
from minisgl.plugins.speculation import DraftProposer
from minisgl.plugins.speculation.adaptive import StepTimes
from minisgl.plugins.speculation.grammar import GrammarDrafts, GrammarProposer
from minisgl.plugins.speculation.none import NoProposer
from minisgl.sampling_params import Grammar
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.sim import EngineSpec

SCHEMA = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "delivery_address_street": {"enum": ["Main Street", "Market Square"]},
        "is_returning_customer": {"type": "boolean"},
        "preferred_name": {"type": "string", "maxLength": 12},
    },
    "required": ["customer_identification_number", "delivery_address_street", "is_returning_customer"],
}


def answers(params: SamplingParams, *options: str) -> tuple[list[list[int]], dict[str, int]]:
    with LLM("tutor", overrides=["device=cpu", "num_pages=2000", *options]) as llm:
        outputs = llm.generate([f"Describe order {i} as JSON." for i in range(8)], params, progress=False)
        for output in outputs:
            json.loads(output.text)
        return [list(output.token_ids) for output in outputs], llm.scheduler.stats()


@pytest.mark.parametrize("then", ["none", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("grammar", ["plain", "llguidance"])
def test_the_same_answers_in_fewer_steps(
    grammar: str, temperature: float, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON with long keys: at least 1.5 tokens a decode row, and the tokens of plain decoding.

    The times of steps, which other work on the machine changes, have no influence here.
    """
    monkeypatch.setattr(StepTimes, "choose", lambda self, rows, options: len(options) - 1)
    if grammar == "llguidance":
        pytest.importorskip("llguidance")
    params = SamplingParams(
        max_tokens=200, temperature=temperature, seed=5, grammar=Grammar("json_schema", json.dumps(SCHEMA))
    )
    overlap = f"overlap={str(then == 'none').lower()}"
    expected, plain = answers(params, f"grammar={grammar}", overlap)
    got, stats = answers(params, f"grammar={grammar}", "speculation=grammar", f"speculation.then={then}", overlap)
    assert got == expected
    rows, tokens = stats["decode_tokens"], sum(map(len, got)) - len(got)  # the first tokens are those of prefill rows
    print(f"{tokens / rows:.2f} tokens a row, {stats['accepted_draft_tokens']} of {stats['draft_tokens']} drafts")
    assert tokens >= 1.5 * rows
    assert stats["steps"] < plain["steps"]


# ---- the proposer alone ----------------------------------------------------------------------------------


class Fixed(Constraint):
    """A grammar that forces ``tokens``."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens = list(tokens)

    def forced(self, count: int) -> Sequence[int]:
        return self.tokens[:count]


class Sevens(DraftProposer):
    max_drafts = 3

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        assert len(reqs) == len(positions) == len(limits)
        return [[7] * limit for limit in limits]


def req(uid: int, tokens: Sequence[int] | None) -> Req:
    made = Req(uid, np.arange(4, dtype=np.int32), SamplingParams(), uid)
    made.constraint = None if tokens is None else Fixed(tokens)
    return made


def test_forced_tokens_first_then_other_drafts() -> None:
    reqs = [req(0, [1, 2, 3, 4]), req(1, []), req(2, None), req(3, [1, 2, 3, 4]), req(4, [5])]
    positions = [4, 4, 4, 5, 5]  # the token before the drafts of the last two is unread
    alone = GrammarProposer(2, NoProposer())
    assert [list(drafts) for drafts in alone.propose(reqs, positions, [9] * 5)] == [[1, 2], [], [], [2, 3], []]
    both = GrammarProposer(8, Sevens())
    assert (both.max_drafts, both.costly) == (8, False)
    found = both.propose(reqs, positions, [3, 2, 8, 0, 1])
    assert [list(drafts) for drafts in found] == [[1, 2, 3], [7, 7], [7, 7, 7], [], [7]]


@pytest.mark.parametrize(("options", "named"), [({"max_drafts": 0}, "max_drafts"), ({"then": "grammar"}, "then")])
def test_wrong_options(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GrammarDrafts(**options).build(lambda name: NoProposer())


# ---- the cut ---------------------------------------------------------------------------------------------


class Spoiled(DraftProposer):
    """Drafts what is right, and in the middle of it a token that the request's grammar forbids."""

    max_drafts = 6

    def __init__(self, drive: Drive):
        self.drive = drive
        self.forbidden = 0

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [self._drafts(*each) for each in zip(reqs, positions, limits, strict=True)]

    def _drafts(self, req: Req, position: int, limit: int) -> list[int]:
        expected = self.drive._streams[req.uid]
        drafts = [expected[position + k] for k in range(min(limit, 6))]
        if len(drafts) > 2 and len(req) == position:
            masks: I32 = req.constraint.masks(drafts)
            drafts[2] = next(t for t in range(self.drive.spec.vocab_size) if not masks[2, t // 32] >> t % 32 & 1)
            self.forbidden += 1
        return drafts


class Launches:
    """An observer that notes the numbers of drafts of verification rows."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def minisgl_batch_scheduled(self, step: Any, **_: Any) -> None:
        self.counts += (step.num_sampled_tokens[step.num_decode : step.num_continuing] - 1).tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_are_cut_before_the_first_forbidden_token(overlap: bool) -> None:
    """Where all tokens before the drafts are known, the drafts after a forbidden one cost no positions."""
    spec = EngineSpec(page_size=4, num_pages=60, max_running_requests=2, max_seq_len=64, vocab_size=50)

    class Late(DraftProposer):
        """`Spoiled`, which needs the drive that is made with it."""

        max_drafts = Spoiled.max_drafts

        def propose(self, *args: Any) -> Sequence[Sequence[int]]:
            return spoiled.propose(*args)

    drive = Drive(
        spec, make_plugin("cache", "naive", page_size=4), make_plugin("scheduler", "mixed"), proposer=Late(),
        overlap=overlap,
    )  # fmt: skip
    spoiled = Spoiled(drive)
    report = drive.run(
        [
            Job(uid, list(range(uid, uid + 5)), SamplingParams(max_tokens=30, temperature=0.0), grammar=0)
            for uid in (1, 2)
        ]
    )
    assert spoiled.forbidden > 8
    # Two right drafts are left of six, unless the token before them was unread.
    assert report.counts.accepted_drafts == report.counts.drafts or overlap
    assert report.counts.drafts < 3 * spoiled.forbidden + 6 * 2
