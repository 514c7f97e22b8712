"""Private memory of the computing process on a CPU: it does not grow with the number of different prompt lengths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from pathlib import Path

from minisgl import LLM, SamplingParams


def private_mib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


with LLM("tutor", overrides=["device=cpu", "num_pages=64", "cache=naive"]) as llm:
    for layer in range(len(llm.engine.model.attention_layers())):
        for buffer in llm.engine.ctx.pool.layer(layer):
            buffer.zero_()  # commits the pool's memory, which would look like growth
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate([[5] * 500], params, progress=False)
    before = private_mib()
    for length in range(100, 500, 4):
        llm.generate([[5] * length], params, progress=False)
    print(private_mib() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="reads the process's memory from Linux's /proc"
)
def test_memory_with_many_prompt_lengths() -> None:
    """Prompts of 100 different lengths grow the process by less than 60 MiB, apart from the KV pool."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    growth = float(out.split()[-1])
    assert growth < 60, f"{growth:.0f} MiB"
