"""On a machine without compiled kernels, other processes compile them before the graphs are recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from minisgl.plugins.graph.replaying.compile_ahead import Case, _kernels_of
from minisgl.plugins.graph.replaying.record import Recorder

PROGRAM = """
import json
import triton
from minisgl import LLM, SamplingParams

if __name__ == "__main__":
    loaded = {"on disk": 0, "compiled here": 0}
    def count(*, cache_hit, **rest):
        loaded["on disk" if cache_hit else "compiled here"] += 1
    triton.knobs.compilation.listener = count
    words = ["load_format=dummy", "device=cuda", "dtype=bfloat16", "num_pages=512", "max_running_requests=64"]
    with LLM("qwen3-0.6b", overrides=words) as llm:
        answer = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0]
    assert triton.knobs.compilation.listener is count
    print(json.dumps({**loaded, "answer": answer.token_ids}))
"""


def start(cache: Path) -> Any:
    """Start an engine with Triton's cache in ``cache``. Return the kernels on disk and compiled here, and an answer."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_compiled_by_other_processes(device: torch.device, tmp_path: Path) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    cold, warm = start(tmp_path), start(tmp_path)
    assert cold["on disk"] > 10 * cold["compiled here"] > 0, cold  # one kernel is compiled to see that none is on disk
    assert warm["compiled here"] == 0 < warm["on disk"], warm
    assert cold["answer"] == warm["answer"]


def test_graphs_that_are_thrown_away_keep_no_memory(device: torch.device) -> None:
    """Else they fill the GPU, and a kernel that is loaded next finds no memory: CUDA reports an unknown error."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    size, recorder = 256 << 20, Recorder(device)

    def forward(inputs: None) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    def note(case: Case) -> list[Any]:
        recorder.rehearse(case.forward, case.build(), piecewise=False)
        return []

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # the default stream cannot be recorded
        list(_kernels_of([Case(lambda: None, forward)] * 6, note))
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_reserved(device) - before < 2 * size
