"""Proposers on real models give the tokens of plain decoding: `ngram` and `suffix` on `tutor` and on each architecture.

The draft model of the documentation drafts for `tutor`.

A matrix product with more rows may round in another way. So where a token first differs, the perturbed scores of both
candidates, logit / temperature + noise, must lie within `GAP`. They are computed by transformers in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minisgl.core import Engine, SamplingParams
from minisgl.engine.gumbel import gumbel, seed_key, token_hashes
from minisgl.models.resolve import resolve_model
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.cache.prefix import make_manager
from minisgl.plugins.speculation import DraftProposer
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.checkpoints import ARCHITECTURES, WITH_STATES, tiny_checkpoint
from minisgl.testing.drive import make_plugin
from minisgl.testing.oracle import Oracle
from minisgl.testing.ranks import leader_engine
from minisgl.testing.small import serve
from minisgl.tokenizer.tokenizer import Tokenizer

WORDS = ["device=cpu", "dtype=float32", "max_running_requests=4", "num_pages=200", "page_size=4", "max_seq_len=200"]
GAP = 1e-4
SEED = 7
TOKENS = 24
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "add_a_draft_model" / "draft_model.py"
OPTIONS = {"ngram": {"match_tokens": 1}, "suffix": {"match_tokens": 1, "max_tokens": 2_000}}


class Case:
    """A running engine, its prompts, and the same model in transformers."""

    def __init__(self, path: Path, engine: Engine, prompts: list[list[int]]):
        self.engine, self.prompts, self.oracle = engine, prompts, Oracle(path)
        self.is_tutor = path == resolve_model("tutor")
        self.hashes = token_hashes(engine.spec.vocab_size, torch.device("cpu"))

    def run(self, name: str, temperature: float) -> tuple[list[list[int]], dict[str, int]]:
        """Return the output of every prompt, and the scheduler's counters. A few prompts run at a time."""
        speculation = self.proposer(name).speculate(self.engine.spec, adapt=False)
        plugins = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed")
        scheduler = Scheduler(
            self.engine, *plugins, max_prefill_tokens=32, speculation=speculation, make_manager=make_manager
        )
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=SEED, ignore_eos=True)
        return serve(scheduler, self.prompts, params), scheduler.stats()

    def proposer(self, name: str) -> DraftProposer:
        """Build a proposer for this engine. ``draft_model`` is the plugin of the documentation."""
        if name == "draft_model":
            manager = PluginManager.load([str(EXAMPLE)])
            config = manager.make("speculation", name)
            config.device = "cpu"
            built: DraftProposer = manager.build("speculation", config, spec=self.engine.spec)
            return built
        arguments = {} if name == "none" else {"spec": self.engine.spec, **OPTIONS[name]}
        return make_plugin("speculation", name, **arguments)  # type: ignore[no-any-return]

    def scores(self, tokens: list[int], temperature: float) -> torch.Tensor:
        """Return the perturbed score of each next token after ``tokens``, float64 ``[vocab]``."""
        logits: torch.Tensor = self.oracle.logits(tokens)[-1]
        if not temperature:
            return logits
        keys = torch.tensor([seed_key(SEED)], dtype=torch.int32)
        return logits / temperature + gumbel(keys, torch.tensor([len(tokens)], dtype=torch.int32), self.hashes)[0]

    def count_differences(self, plain: list[list[int]], drafted: list[list[int]], temperature: float) -> int:
        """Return how many outputs differ. Check the scores of both tokens at the first difference of each."""
        differing = 0
        for prompt, first, second in zip(self.prompts, plain, drafted, strict=True):
            assert len(first) == len(second)
            at = next((k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), None)
            if at is not None:
                differing += 1
                scores = self.scores([*prompt, *first[:at]], temperature)
                gap = abs(float(scores[first[at]] - scores[second[at]]))
                assert gap < GAP, f"token {at} is {second[at]} and not {first[at]}, and their scores differ by {gap:g}"
        return differing


MODELS = ["tutor", *(name for name in ARCHITECTURES if name not in WITH_STATES)]


def cases() -> Iterator[Any]:
    """Yield each model with one rank and with two. All but `tutor` take turns, unless the thorough tests run."""
    for number, model in enumerate(MODELS):
        for tp in (1, 2):
            other = model != "tutor" and tp != 1 + number % 2
            yield pytest.param(f"{model}-tp{tp}", marks=[pytest.mark.thorough] if other else [])


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    model, _, tp = request.param.rpartition("-tp")
    if model == "tutor":
        path = resolve_model("tutor")
        tokenizer = Tokenizer.from_dir(path)
        assert tokenizer is not None
        texts = ("What is a page?", "Repeat: one two three four, one two three four, one two")
        prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    else:
        path = tiny_checkpoint(model, tmp_path_factory.mktemp(model))
        prompts = [Random(seed).choices(range(3, 320), k=5 + 4 * seed) * 2 for seed in range(3)]
    manager = PluginManager.load()
    with leader_engine(compose(manager, [f"model={path}", f"tp={tp}", *WORDS]), manager) as engine:
        yield Case(path, engine, prompts * 3)  # copies, for which `suffix` knows the answer


def test_drafts_change_no_token(case: Case) -> None:
    """With both temperatures in one test, no second process makes the case again."""
    for temperature in (0.0, 0.8):
        plain, stats = case.run("none", temperature)
        assert stats["draft_tokens"] == 0
        for prompt, output in zip(case.prompts[:2], plain, strict=False):
            for k in (0, 1, TOKENS // 2, TOKENS - 1):  # the scores of this file are those of the engine
                scores = case.scores([*prompt, *output[:k]], temperature)
                assert float(scores.max() - scores[output[k]]) < GAP
        for name in [*OPTIONS, "draft_model"] if case.is_tutor else OPTIONS:
            drafted, stats = case.run(name, temperature)
            differing = case.count_differences(plain, drafted, temperature)
            print(
                f"{name} at {temperature}: {stats['accepted_draft_tokens']} of {stats['draft_tokens']} drafts "
                f"accepted in {stats['steps']} steps; {differing} of {len(plain)} outputs differ"
            )
            assert stats["draft_tokens"] > 0
            if name in ("suffix", "draft_model"):
                assert stats["accepted_draft_tokens"] > TOKENS
