"""The draft model in the conformance kit, and its drafts for `tutor` compared with drafts without kept KV."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from draft_model import DraftModel, DraftModelProposer

from minisgl import LLM, SamplingParams
from minisgl.core import EngineSpec, Req
from minisgl.models.resolve import resolve_model
from minisgl.plugins.speculation import DraftProposer
from minisgl.testing.proposer import ProposerConformance


class WithoutKeptKV(DraftProposer):
    """Passes all calls on to ``tested``, and compares each draft with that of a row that has no KV yet."""

    def __init__(self, tested: DraftModelProposer, reference: DraftModelProposer):
        self.max_drafts, self.tested, self.reference = tested.max_drafts, tested, reference
        self.num_drafts = 0

    def removed(self, req: Req) -> None:
        self.tested.removed(req)

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = self.tested.propose(reqs, positions, limits)
        for i, req in enumerate(reqs):
            (expected,) = self.reference.propose([req], positions[i : i + 1], limits[i : i + 1])
            self.reference.removed(req)
            assert drafts[i] == expected, f"{req} got the drafts {drafts[i]}, and without kept KV it gets {expected}"
            self.num_drafts += len(drafts[i])
        return drafts

    def close(self) -> None:
        self.tested.close()
        self.reference.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_kept_kv(temperature: float) -> None:
    """Six requests, of which four run at a time, with accepted and wrong drafts, and retractions."""
    prompts = [f"Count from {n} to {n + 20}." for n in range(5)] + ["What is a page?"]
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=1, ignore_eos=True)
    words = ["device=cpu", "max_running_requests=4", "num_pages=12", "cache=naive"]
    with LLM("tutor", overrides=[*words, "plugins=draft_model.py", "speculation=draft_model"]) as llm:
        speculation = llm.scheduler.speculation
        checked = WithoutKeptKV(*(DraftModelProposer(DraftModel(device="cpu"), llm.engine.spec) for _ in range(2)))
        speculation.proposer, speculation.adapt = checked, False
        llm.generate(prompts, params)
        stats = llm.scheduler.stats()
    assert checked.num_drafts > 200 < stats["draft_tokens"] > stats["accepted_draft_tokens"] > 50
    assert stats["retractions"] > 0
    assert not checked.tested.rows, "a removed request has a row"


class TestDraftModel(ProposerConformance):
    """A small model with random weights, and as many tokens as the kit's engine has."""

    runs = 4
    salt_runs = 1

    @pytest.fixture(autouse=True)
    def set_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, spec: EngineSpec) -> DraftModelProposer:
        raw = json.loads((resolve_model("tutor-draft") / "config.json").read_text())
        raw |= {"vocab_size": spec.vocab_size, "hidden_size": 32, "num_hidden_layers": 1, "layer_types": None}
        (self.folder / "config.json").write_text(json.dumps(raw))
        options = DraftModel(model=str(self.folder), load_format="dummy", device="cpu", max_drafts=2)
        return DraftModelProposer(options, spec)
