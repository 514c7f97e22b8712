"""The Triton backends in the engine: promise 8 with and without CUDA graphs.

Greedy tokens are compared with transformers in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.plugins.kernels.attention import shared_prefix
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.idle import check_idle
from minisgl.testing.oracle import Oracle

pytest.importorskip("transformers", reason="transformers writes the checkpoints and is the oracle")

MODELS = ("qwen3", "llama", "qwen3_moe")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> dict[str, Path]:
    """Return random checkpoints by model name; under the interpreter only the MoE model's."""
    names = MODELS if device.type == "cuda" else MODELS[-1:]
    return {name: tiny_checkpoint(name, tmp_path_factory.mktemp(name)) for name in names}


def prompts(count: int) -> list[list[int]]:
    """Return ``count`` random prompts; every second one begins with the same 35 tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 320, 35).tolist()
    return [(shared if i % 2 else []) + rng.integers(3, 320, 1 + 3 * i).tolist() for i in range(count)]


def options(device: torch.device, *more: str) -> list[str]:
    """Return the options that select the Triton backends, and ``more``."""
    fixed = ["attention=triton", "moe=triton", "dtype=float32", "num_pages=1024", "max_running_requests=40"]
    return [*fixed, f"device={device.type}", *more]


@pytest.mark.parametrize("graph", ["none", "cuda"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", MODELS)
def test_promise_8(
    model: str, page_size: int, graph: str, checkpoints: dict[str, Path], device: torch.device, compiled: bool
) -> None:
    if not compiled and (model, graph, page_size) != ("qwen3_moe", "none", 16):
        pytest.skip("too slow for the interpreter" if graph == "none" else "needs a CUDA device: CUDA graphs")
    count, tokens = (24, 16) if compiled else (3, 3)
    words = options(device, f"graph={graph}", f"page_size={page_size}", "max_prefill_tokens=48")
    asked, greedy = prompts(count), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with LLM(str(checkpoints[model]), overrides=words) as llm:
        outputs = [output.token_ids for output in llm.generate(asked, greedy)]
        check_idle(llm.scheduler)
    assert all(len(output) == tokens for output in outputs)
    Oracle(checkpoints[model]).check_all(asked, outputs)


@pytest.mark.parametrize("graph", ["none", "cuda"])
def test_promise_8_shared_prefix(
    graph: str, checkpoints: dict[str, Path], device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled and graph == "cuda":
        pytest.skip("needs a CUDA device: CUDA graphs")
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_TOKENS", 1)
    lengths, find = [], shared_prefix.SharedPrefixInputs.find_shared_prefix
    monkeypatch.setattr(
        shared_prefix.SharedPrefixInputs, "find_shared_prefix", lambda *args: lengths.append(find(*args)) or lengths[-1]
    )
    count, tokens = (24, 16) if compiled else (2, 3)
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 320, 100).tolist()
    asked = [shared + rng.integers(3, 320, 1 + 3 * i).tolist() for i in range(count)]
    words = options(device, f"graph={graph}", "page_size=16")
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    model = checkpoints[MODELS[0] if compiled else MODELS[-1]]
    with LLM(str(model), overrides=words) as llm:
        outputs = [output.token_ids for output in llm.generate(asked, greedy)]
        if graph == "cuda":
            assert any(key.shared_prefix for key in llm.engine.runner.buffers)  # type: ignore[attr-defined]
    assert sum(lengths) >= tokens - 1
    Oracle(model).check_all(asked, outputs)


def test_promise_8_with_groups(
    device: torch.device, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, sinks and pages by KV group: prompts in chunks, and a warm cache."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_TOKENS", 1)  # that of several groups is not used
    path = tiny_checkpoint("gpt_oss", tmp_path, swiglu_limit=7.0)  # older transformers have no other
    count, tokens = (12, 24) if compiled else (1, 3)
    rng = np.random.default_rng(4)
    shared = rng.integers(3, 320, 40).tolist()
    asked = [shared + rng.integers(3, 320, 1 + 3 * i).tolist() for i in range(count)]
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    words = ["attention=triton", "moe=torch", "dtype=float32", "cache=groups", "graph=none", f"device={device.type}"]
    with LLM(str(path), overrides=[*words, "page_size=4", "num_pages=1024", "max_prefill_tokens=32"]) as llm:
        assert len(llm.engine.spec.groups) == 2
        outputs = [llm.generate([prompt], greedy)[0] for prompt in asked] + llm.generate(asked, greedy)
        check_idle(llm.scheduler)
    assert outputs[-1].cached_tokens > 0
    Oracle(path).check_all([*asked, *asked], [output.token_ids for output in outputs])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_promise_8_piecewise_graphs(
    model: str, attention: str, checkpoints: dict[str, Path], device: torch.device, compiled: bool
) -> None:
    """Steps with prefill rows are replayed in pieces, with attention between the pieces.

    There are buckets with fewer and with more tokens than ``max_running_requests``, full chunks, and steps too large
    for any bucket. The launches of ``attention=torch`` depend on the lengths, so its decode steps are replayed in
    pieces too.
    """
    if not compiled:
        pytest.skip("needs a CUDA device: CUDA graphs")
    asked = [*prompts(24), list(range(3, 200)), list(range(5, 160))]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    words = options(device, "graph=cuda", "graph.max_tokens=64", "max_prefill_tokens=96", "max_running_requests=20")
    with LLM(str(checkpoints[model]), overrides=[*words, f"attention={attention}"]) as llm:
        engine: Any = llm.engine
        graph, replayed = engine.graph, []
        run = graph.run
        graph.run = lambda key: replayed.append(key) or run(key)
        outputs = [output.token_ids for output in llm.generate(asked, greedy)]
        again = [output.token_ids for prompt in asked[:8] for output in llm.generate([prompt], greedy)]
    sizes = {key.rows for key in replayed if key.piecewise}
    assert {16, 96} <= sizes
    assert sizes & {32, 48, 64}
    oracle = Oracle(checkpoints[model])
    oracle.check_all(asked, outputs)
    oracle.check_all(asked[:8], again)


def test_simulated_graph_replays_triton_launches(
    checkpoints: dict[str, Path], device: torch.device, compiled: bool
) -> None:
    """torch does not see a Triton kernel: without `one_launch` a simulated graph would leave it out."""
    if compiled:
        pytest.skip("graph=simulated runs on a CPU")
    asked, greedy = prompts(1), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    words = options(device, "graph=simulated", "graph.max_rows=1")
    with LLM(str(checkpoints["qwen3_moe"]), overrides=words) as llm:
        outputs = [output.token_ids for output in llm.generate(asked, greedy)]
        graph = llm.engine.graph  # type: ignore[attr-defined]
        names = [operation.name for operation in next(iter(graph.graphs.values())).operations]
        assert graph.replays == 2
    assert names.count("TritonAttention.forward") == names.count("TritonMoe.forward") == 2
    Oracle(checkpoints["qwen3_moe"]).check_all(asked, outputs)


def test_seeded_sampling_is_independent_of_the_batch(
    checkpoints: dict[str, Path], device: torch.device, compiled: bool
) -> None:
    if not compiled:
        pytest.skip("needs a CUDA device: on a CPU the sampler is plain torch")
    asked = prompts(16)
    for extra in ({}, {"top_k": 40, "top_p": 0.9}):
        drawn = SamplingParams(temperature=0.9, seed=11, max_tokens=12, ignore_eos=True, **extra)  # type: ignore[arg-type]
        with LLM(str(checkpoints["qwen3"]), overrides=options(device, "graph=cuda")) as llm:
            together = [output.token_ids for output in llm.generate(asked, drawn)]
            alone = [llm.generate([prompt], drawn)[0].token_ids for prompt in asked[:4]]
        assert together[:4] == alone
        assert len({tuple(output) for output in together}) > 8
