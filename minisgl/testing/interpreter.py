"""Runs test files of Triton kernels on a CPU, under Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before Triton is imported, and then applies to the whole process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["run_interpreted"]


def run_interpreted(*files: Path) -> str:
    """Run pytest on ``files`` under Triton's interpreter, and return the last line of its output.

    Raise AssertionError with pytest's output if a test failed or if no test ran.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]  # set by the outer pytest run: its xdist worker and its current test
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = done.stdout.rstrip().rpartition("\n")[2]
    if done.returncode != 0 or not re.search(r"\b[1-9]\d* passed", last):
        raise AssertionError(
            f"expected all tests to pass under Triton's interpreter; pytest exited with status {done.returncode}:\n"
            f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
        )
    return last
