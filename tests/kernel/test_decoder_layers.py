"""All decoder layers of a step in one call of C++, compared with the layers' own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.plugins.kernels.converted.cpu_layers import CpuDecoderLayers
from minisgl.plugins.kernels.ops.cpp import attention as kernel
from minisgl.plugins.kernels.ops.cpp.decoder_layers import MAX_TOKENS
from minisgl.testing.checkpoints import tiny_checkpoint

PROMPTS = ["Hello there, what is", "The scheduler", "a", "b c d e", "pages"]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        kernel.compiled()
    except ConfigError as error:
        pytest.skip(f"compiler: {error}")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each step that is computed in one call adds its number of tokens."""
    rows: list[int] = []
    real = CpuDecoderLayers.serves

    def serves(self: CpuDecoderLayers, x: torch.Tensor) -> bool:
        found = real(self, x)
        if found:
            rows.append(len(x))
        return found

    monkeypatch.setattr(CpuDecoderLayers, "serves", serves)
    return rows


def outputs(llm: LLM) -> str:
    return repr([(o.token_ids, o.logprobs) for o in llm.generate(PROMPTS, PARAMS)])


@pytest.mark.parametrize("options", [["dtype=bfloat16"], ["quantize=int4"], ["quantize=int8", "dtype=bfloat16"], []])
def test_same_bits(options: list[str], monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """Tokens and log-probabilities are those of the layers' own code bit by bit, with any number of threads."""
    with LLM("tutor", overrides=["device=cpu", *options]) as llm:
        rows = served(monkeypatch)
        got = outputs(llm)
        assert len(PROMPTS) in rows
        for count in (1, 3):
            torch.set_num_threads(count)
            assert outputs(llm) == got
        before = len(rows)
        monkeypatch.setattr(CpuDecoderLayers, "serves", lambda self, x: False)
        assert outputs(llm) == got
        assert len(rows) == before


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma3ForCausalLM"])
def test_architectures(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with biases is computed in one call; one whose layers are its own is not."""
    path = tiny_checkpoint(architecture, tmp_path)
    prompts: list[Any] = [[5, 6, 7], [9, 8]]
    with LLM(str(path), overrides=["device=cpu", "max_seq_len=64"]) as llm:
        rows = served(monkeypatch)
        got = [o.token_ids for o in llm.generate(prompts, PARAMS)]
        assert bool(rows) == (architecture == "Qwen2ForCausalLM")
        monkeypatch.setattr(CpuDecoderLayers, "serves", lambda self, x: False)
        assert [o.token_ids for o in llm.generate(prompts, PARAMS)] == got


def test_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside the team reaches the caller, and the next call works."""
    with LLM("tutor", overrides=["device=cpu"]) as llm:
        want = outputs(llm)
        (layers,) = [m for m in llm.engine.model.modules() if isinstance(m, CpuDecoderLayers)]  # type: ignore[attr-defined]
        assert layers.product is not None
        assert layers.product.max_tokens <= MAX_TOKENS
        x, wrong = torch.zeros(2, 256), torch.zeros(2, 64, dtype=torch.float64)
        rows = [torch.zeros(shape, dtype=torch.int32) for shape in [(1, 1), (2,), (2,), (3,)]]
        with pytest.raises(ValueError, match="cos_sin must be float32"):
            layers.product.function(x, x.clone(), wrong, torch.zeros(2, dtype=torch.int64), *rows, 2)
        assert outputs(llm) == want
