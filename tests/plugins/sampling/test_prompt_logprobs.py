"""Tests of the log-probabilities of prompt tokens against transformers, for every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import Engine, EngineSpec, Logprobs, SamplingParams
from minisgl.engine.build import build_engine
from minisgl.engine.engine import TorchEngine
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.sampling import prompt_logprobs
from minisgl.testing.checkpoints import ARCHITECTURES, WITH_STATES, tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.ranks import leader_engine
from minisgl.testing.steps import RowSpec, StepWriter

WORDS = ["device=cpu", "max_running_requests=4", "num_pages=80", "page_size=4"]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load()


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name not in WITH_STATES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Any]:
    """Return a checkpoint, a prompt of 60 tokens, and transformers' log-probabilities [60, vocab] in float32."""
    path = tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    prompt = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(3))
    return path, prompt.tolist(), Oracle(path, "float32").logits(prompt).log_softmax(-1)


def engine_of(manager: PluginManager, path: Path, *words: str) -> TorchEngine:
    return build_engine(compose(manager, [f"model={path}", *WORDS, *words]), manager)


def chunk(
    req_pool_idx: int, prompt: Sequence[int], start: int, end: int, num_top: int, first: int = 0, samples: bool = False
) -> RowSpec:
    """Return the row that computes positions ``start`` to ``end`` of the prompt and scores the tokens after them.

    The scored tokens are those after positions ``first`` and later; the token after the prompt is not scored.
    """
    row = RowSpec.prompt(req_pool_idx, prompt[start:end], GREEDY)
    if start:
        row.admission = None
    row.start, row.num_sampled = start, int(samples)
    row.first_position, row.num_top = max(start, first), num_top
    row.targets = prompt[row.first_position + 1 : end + 1]
    return row


def check(entries: Sequence[Logprobs], prompt: Sequence[int], first: int, num_top: int, expected: Any) -> None:
    """Compare the entries of the tokens after position ``first`` and later with transformers."""
    assert len(entries) > 0
    for position, entry in enumerate(entries, first):
        assert entry.chosen == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
        top = expected[position].topk(num_top)
        assert list(entry.top_ids) == top.indices.tolist()
        assert entry.top == pytest.approx(top.values.tolist(), abs=1e-4)


def compare(engine: Engine, prompt: list[int], expected: Any) -> None:
    """Score a prompt as a whole, in chunks and after a cached prefix, beside rows that decode and verify."""
    writer = StepWriter(engine.spec)

    def run(*rows: RowSpec) -> Any:
        engine.launch(writer.step(*rows))
        return engine.result()

    result = run(chunk(0, prompt, 0, 60, 3, samples=True))  # the whole prompt in one step
    check(result.prompt_logprobs[0], prompt, 0, 3, expected)
    assert [len(entries) for entries in result.prompt_logprobs] == [59]
    assert result.tokens.tolist() == [[int(expected[59].argmax())]]

    got: list[Logprobs] = []  # in chunks of uneven length, from position 4 on, while request 0 decodes and verifies
    for start, end in ((0, 3), (3, 7), (7, 40), (40, 60)):
        other = RowSpec.verify(0, 60, [9, 9]) if start else RowSpec.decode(0, 60, int(result.tokens[0, 0]))
        result = run(other, chunk(1, prompt, start, end, 2, first=4, samples=end == 60))
        got += [entry for entries in result.prompt_logprobs for entry in entries]
    check(got, prompt, 4, 2, expected)
    assert len(got) == 55
    assert result.tokens[1, 0] == int(expected[59].argmax())

    tails = []  # two requests at once with different numbers of alternatives, on the pages of request 0's prefix
    for idx, start, num_top in ((2, 20, 0), (3, 48, 20)):
        row = chunk(idx, prompt, start, 60, num_top, samples=True)
        row.shared = {column: column for column in range(start // 4)}
        tails.append(row)
    result = run(*tails)
    for entries, row in zip(result.prompt_logprobs, tails, strict=True):
        check(entries, prompt, row.start, row.num_top, expected)


def test_prompt_logprobs_equal_transformers(
    case: tuple[Path, list[int], Any], manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt, expected = case
    monkeypatch.setattr(prompt_logprobs, "BLOCK_BYTES", 4 * 320 * 7)
    engine = engine_of(manager, path)
    compare(engine, prompt, expected)
    engine.close()


def test_prompt_logprobs_of_steps_in_pieces(tmp_path: Path, manager: PluginManager) -> None:
    """Steps that are replayed in pieces score prompts too."""
    path, prompt = tiny_checkpoint("qwen3", tmp_path), list(range(30, 90))
    expected = Oracle(path, "float32").logits(prompt).log_softmax(-1)
    engine = engine_of(manager, path, "graph=simulated", "graph.max_tokens=128")
    compare(engine, prompt, expected)
    graphs: Any = engine.graph.graphs  # type: ignore[attr-defined]
    assert sum(graph.replays for key, graph in graphs.items() if key.piecewise) == 6
    engine.close()


def test_prompt_logprobs_on_two_ranks(tmp_path: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a block are a collective, so all ranks compute the same blocks."""
    path, prompt = tiny_checkpoint("llama", tmp_path, vocab_size=323), list(range(30, 90))
    monkeypatch.setattr(prompt_logprobs, "BLOCK_BYTES", 4 * 323 * 7)
    expected = Oracle(path, "float32").logits(prompt).log_softmax(-1)
    with leader_engine(compose(manager, [f"model={path}", *WORDS, "tp=2"]), manager) as engine:
        compare(engine, prompt, expected)


def test_prompts_without_sampling_score(
    case: tuple[Path, list[int], Any], manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in which no row samples scores a prompt; logits are computed for at most `BLOCK_BYTES` at a time."""
    path, prompt, expected = case
    engine = engine_of(manager, path)
    rows: list[int] = []
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    monkeypatch.setattr(prompt_logprobs, "BLOCK_BYTES", 4 * 320 * 16)
    engine.launch(StepWriter(engine.spec).step(chunk(0, prompt, 0, 50, 1)))
    result = engine.result()
    check(result.prompt_logprobs[0], prompt, 0, 1, expected)
    assert result.accepted.tolist() == [0]
    assert rows == [16, 16, 16, 2]
    engine.close()


def test_block_size() -> None:
    """A block of the logits of Qwen3's vocabulary is at most 64 MiB in float32."""
    assert prompt_logprobs.BLOCK_BYTES == 64 << 20
    asked: list[int] = []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        return torch.zeros(len(hidden), 10)

    log_sum_exp = partial(torch.logsumexp, dim=1, keepdim=True)
    targets = torch.zeros(300, dtype=torch.int32)
    prompt_logprobs.score_prompt(torch.zeros(300, 4), targets, 0, logits_of, log_sum_exp, 151_936)
    assert asked == [110, 110, 80]


def test_indices_of_prompt_positions() -> None:
    """`token_indices` lists the tokens of each range within the step, behind decode rows."""
    prompt = list(range(20, 50))
    step = StepWriter(EngineSpec(4, 80, 4, 60, 99)).step(
        RowSpec.decode(3, 5), chunk(0, prompt, 4, 9, 1, first=6), chunk(1, prompt, 0, 3, 0)
    )
    indices = prompt_logprobs.token_indices(step)
    assert indices.tolist() == [3, 4, 5, 6, 7, 8]
    assert indices.dtype == np.int32
