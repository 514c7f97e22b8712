"""The scheduler on a real engine with a proposer and with grammars: every token is what transformers would choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minisgl.core import I32, Req, SamplingParams
from minisgl.engine.build import build_engine
from minisgl.engine.engine import TorchEngine
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.cache.prefix import make_manager
from minisgl.plugins.constraint.base import Constraint
from minisgl.plugins.speculation import DraftProposer
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.drive import make_plugin
from minisgl.testing.oracle import Oracle
from minisgl.testing.small import serve

WORDS = ["device=cpu", "max_running_requests=4", "num_pages=60", "page_size=4", "seed=1"]
VOCABULARY = 320
PROMPTS = [Random(seed).choices(range(3, VOCABULARY), k=7 + 5 * seed) for seed in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(path: Path) -> Iterator[TorchEngine]:
    manager = PluginManager.load()
    made = build_engine(compose(manager, [f"model={path}", *WORDS]), manager)
    yield made
    made.close()


def run(
    engine: TorchEngine, params: SamplingParams, proposer: DraftProposer | None = None, **more: Any
) -> tuple[list[list[int]], dict[str, int]]:
    """Return the output tokens of all prompts, and the scheduler's counters."""
    plugins = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed")
    speculation = None if proposer is None else proposer.speculate(engine.spec, adapt=False)
    scheduler = Scheduler(
        engine, *plugins, max_prefill_tokens=16, speculation=speculation, **more, make_manager=make_manager
    )
    return serve(scheduler, PROMPTS, params), scheduler.stats()


class Replay(DraftProposer):
    """A proposer that knows the answers, and makes a mistake in about one of four drafts."""

    max_drafts = 4

    def __init__(self, answers: list[list[int]]):
        self.answers = answers

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = []
        for req, position, limit in zip(reqs, positions, limits, strict=True):
            first = position - len(req.prompt_ids)
            known = self.answers[req.uid][first : first + min(limit, 4)]
            wrong = Random(1000 * req.uid + position)
            drafts.append([(token + (wrong.random() < 0.25)) % VOCABULARY for token in known])
        return drafts


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_do_not_change_greedy_output(engine: TorchEngine, path: Path, overlap: bool) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain, _ = run(engine, params, overlap=overlap)
    drafted, stats = run(engine, params, overlap=overlap, proposer=Replay(plain))
    assert stats["draft_tokens"] > stats["accepted_draft_tokens"] > 100
    assert stats["steps"] < 150
    oracle = Oracle(path)
    oracle.check_all(PROMPTS, drafted)
    assert sum(map(list.__eq__, drafted, plain)) >= 5  # a product with more rows may round another way


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_do_not_change_sampled_output(engine: TorchEngine, overlap: bool) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=7, presence_penalty=0.7, ignore_eos=True)
    plain, _ = run(engine, params, overlap=overlap)
    drafted, stats = run(engine, params, overlap=overlap, proposer=Replay(plain))
    assert stats["accepted_draft_tokens"] > 50
    assert sum(map(list.__eq__, drafted, plain)) >= 5


class Alternating(Constraint):
    """A grammar that allows even tokens, then odd ones, then even ones again."""

    def __init__(self) -> None:
        self.length = 0

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token % 2 == self.length % 2
            self.length += 1

    def masks(self, drafts: Sequence[int]) -> I32:
        bits = [0x55555555 if (self.length + k) % 2 == 0 else 0xAAAAAAAA for k in range(1 + len(drafts))]
        return np.repeat(np.array(bits, np.uint32)[:, None], VOCABULARY // 32, axis=1).view(np.int32)


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_is_obeyed(engine: TorchEngine, path: Path, overlap: bool, speculation: bool) -> None:
    """Two of three requests have a grammar; each token is the most likely one that its grammar allows."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)

    def constraint_of(req: Req) -> Alternating | None:
        return Alternating() if req.uid % 3 else None

    free, _ = run(engine, params, overlap=overlap)
    expected, _ = run(engine, params, overlap=overlap, constraint_of=constraint_of)
    more: dict[str, Any] = {"proposer": Replay(expected)} if speculation else {}
    got, stats = run(engine, params, overlap=overlap, constraint_of=constraint_of, **more)
    assert not speculation or stats["accepted_draft_tokens"] > 20
    oracle = Oracle(path)
    for uid, prompt in enumerate(PROMPTS):
        if uid % 3 == 0:
            assert got[uid] == free[uid]
            continue
        logits = oracle.logits([*prompt, *got[uid]])[len(prompt) - 1 :]
        for k, token in enumerate(got[uid]):
            assert token % 2 == k % 2
            assert float(logits[k][k % 2 :: 2].max() - logits[k][token]) < 1e-4
