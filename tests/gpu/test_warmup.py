"""After the start, no request waits for a compiler: a mixed workload compiles and loads no kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from minisgl import LLM, SamplingParams
from minisgl.testing.checkpoints import tiny_checkpoint

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"temperature": 0.0, "presence_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": {3: 1.5, 5: -2.0}},
    {"temperature": 0.0, "logprobs": 4},
    {"temperature": 0.0, "prompt_logprobs": 2},
)


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    """Skip all tests of the module without a GPU."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")


def workload(llm: LLM, longest: int) -> None:
    """Serve requests of every kind alone, then together, with 1 to 64 rows, long prompts and cached prefixes."""
    rng = np.random.default_rng(0)
    params = [SamplingParams(max_tokens=5, ignore_eos=True, seed=1, **kind) for kind in KINDS]

    def serve(lengths: Sequence[int], each: Sequence[SamplingParams], prefix: Sequence[int] = ()) -> None:
        vocab = llm.engine.spec.vocab_size
        prompts = [[*prefix, *rng.integers(0, vocab, length).tolist()] for length in lengths]
        llm.generate(prompts, list(islice(cycle(each), len(prompts))), progress=False)

    for kind in params:
        serve([30], [kind])
    for rows in (2, 3, 7, 20, 64):
        serve([9] * rows, params[:1])
        serve([9 + i % 40 for i in range(rows)], params)
    for length in (1, 100, longest // 3, longest):
        serve([length], params[:1])
    prefix = list(range(200))
    for rows in (1, 40):
        serve([5] * rows, params[:2], prefix)


def check(name: str, words: Sequence[str]) -> None:
    """Serve the workload with the model ``name``, and assert that nothing is compiled or loaded in the meantime."""
    with LLM(name, overrides=words) as llm:
        workload(llm, 5000)
        late = llm.engine.kernels.compilations
        assert not any(late.counts().values()), (late.counts(), late.triton)


def options(policy: str) -> list[str]:
    """Return the options of an engine with the scheduling policy."""
    return [
        "device=cuda",
        "dtype=bfloat16",
        "num_pages=1024",
        "max_prefill_tokens=2048",
        f"scheduler={policy}",
        "speculation=ngram",  # random text with short prefixes repeats nothing, but `match_tokens=1` finds drafts
        "speculation.match_tokens=1",
    ]


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_nothing_is_compiled_after_the_start(model: str, policy: str, tmp_path: Path) -> None:
    if model == "dense":
        check("qwen3-0.6b", ["load_format=dummy", *options(policy)])
        return
    pytest.importorskip("transformers", reason="transformers writes the checkpoint")
    sizes = {"hidden_size": 256, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4}
    check(str(tiny_checkpoint("qwen3_moe", tmp_path, **sizes, max_position_embeddings=8192)), options(policy))


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_no_fp8_kernel_is_compiled_after_the_start(policy: str, tmp_path: Path) -> None:
    """DeepGEMM has several kernels for each weight, for steps of 1,667 and of 2,048 tokens others.

    It reads the folder of its kernels from the environment once, so another process has an empty one.
    """
    environment = {**os.environ, "TRTLLM_DG_CACHE_DIR": str(tmp_path)}
    words = ["load_format=dummy", "quantize=fp8", "fp8_gemm.behind=false", *options(policy)]
    command = [sys.executable, __file__, "qwen3-0.6b", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len([*tmp_path.rglob("*.cubin")]) > 10, "the kernels of this process were not compiled in its own folder"


@triton.jit
def planted_kernel(x, n: tl.constexpr):
    """Double n elements of x."""
    i = tl.arange(0, n)
    tl.store(x + i, 2 * tl.load(x + i))


def test_a_late_compilation_is_found() -> None:
    with LLM("tutor", overrides=["device=cuda", "dtype=bfloat16", "num_pages=256"]) as llm:
        x = torch.ones(64, device="cuda")
        planted_kernel[(1,)](x, 64)
        assert llm.engine.kernels.compilations.triton == ["planted_kernel"]
        planted_kernel[(1,)](x, 64)
        assert llm.engine.kernels.compilations.counts()["triton"] == 1
        assert x.eq(4).all()


if __name__ == "__main__":
    check(sys.argv[1], sys.argv[2:])
