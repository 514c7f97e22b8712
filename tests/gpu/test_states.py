"""Recurrent states on a GPU: CUDA graphs and saved states. Greedy tokens are compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.idle import check_idle
from minisgl.testing.oracle import Oracle

pytest.importorskip("transformers", reason="transformers writes the checkpoints and is the oracle")

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
LONG = [(7 * i * i + 3) % 320 for i in range(100)]
PROMPTS = [LONG, [*LONG[:60], 5, 6], [*LONG[:97], 1], LONG[1:50], [4, 5], LONG[:49], [*LONG[:48], 9], LONG[5:90]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Qwen3-Next with experts in every layer but the first."""
    return tiny_checkpoint("qwen3_next", tmp_path_factory.mktemp("qwen3_next"), mlp_only_layers=[0])


@pytest.mark.parametrize("graph", ["graph=none", "graph=cuda", "graph=replay"])
@pytest.mark.parametrize("page_size", [1, 8])
def test_promise_8_with_saved_states(graph: str, page_size: int, path: Path, device: torch.device) -> None:
    """Hit and miss give equal answers, alone and eight at a time, with retractions; graphs replay the decode steps."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    words = (
        f"device=cuda dtype=float32 cache=states max_prefill_tokens=40 max_seq_len=160 max_running_requests=8 {graph}"
    )
    sizes = f"page_size={page_size} num_pages={264 // page_size} cache.spacing=24 cache.snapshots=6"
    with LLM(str(path), overrides=[*words.split(), *sizes.split()]) as llm:
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in (LONG, LONG, PROMPTS[1])]
        llm.scheduler.cache_manager.reserve.mean_length = 0.0  # admit more than fit to their end
        outputs += llm.generate(PROMPTS, GREEDY)
        assert llm.scheduler.stats()["retractions"] > 0
        engine: Any = llm.engine
        buffers = getattr(engine.runner, "buffers", {})
        assert (len(buffers) > 2) == (graph != "graph=none")
        assert not any(key.piecewise for key in buffers)
        if graph == "graph=replay":
            assert engine.graph.replays > 50
            assert engine.graph.padded_rows > 0
    Oracle(path).check_all([LONG, LONG, PROMPTS[1], *PROMPTS], [list(output.token_ids) for output in outputs])
    assert sum(output.cached_tokens > 0 for output in outputs) > 4


def test_promise_8_with_saved_states_on_two_gpus(path: Path, device: torch.device) -> None:
    """Each rank has the states of its heads: hits, retractions and graphs as on one GPU."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    words = "device=cuda dtype=float32 cache=states max_prefill_tokens=40 max_seq_len=160 max_running_requests=8 tp=2"
    sizes = "page_size=8 num_pages=33 cache.spacing=24 cache.snapshots=6 graph=cuda"
    with LLM(str(path), overrides=[*words.split(), *sizes.split()]) as llm:
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in (LONG, LONG)]
        llm.scheduler.cache_manager.reserve.mean_length = 0.0  # admit more than fit to their end
        outputs += llm.generate(PROMPTS, GREEDY)
        assert llm.scheduler.stats()["retractions"] > 0
        check_idle(llm.scheduler)
    Oracle(path).check_all([LONG, LONG, *PROMPTS], [list(output.token_ids) for output in outputs])
    assert [output.cached_tokens for output in outputs[:2]] == [0, 96]
    assert sum(output.cached_tokens > 0 for output in outputs) > 4
