"""Runs test files of Triton kernels on a CPU, under Triton's interpreter, in a process of their own.

TRITON_INTERPRET must be set before Triton is imported, and then concerns everything in the process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["run_interpreted"]


def run_interpreted(*files: Path) -> str:
    """Run pytest on ``files``; returns its last line. Raises AssertionError with its output where a test failed, or
    where none ran."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]  # the outer run's: its worker's number, its current test
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    last = done.stdout.rstrip().rpartition("\n")[2]
    if done.returncode != 0 or not re.search(r"\b[1-9]\d* passed", last):
        raise AssertionError(f"under the interpreter:\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}")
    return last
