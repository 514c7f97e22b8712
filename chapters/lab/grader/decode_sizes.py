"""The numbers of rows of 2,000 decode steps of a server that is quiet half the time and busy half the time.

They show how many rows of padding the buckets of a graph runner cost.
"""

from __future__ import annotations

import random

import torch

from minisgl.chapters.lab.grader.gate import Student
from minisgl.testing.graph import GraphRig

__all__ = ["MOST_ROWS", "decode_sizes", "padding"]

MOST_ROWS, STEPS = 64, 2000
"""``max_running_requests`` of the server, and the number of steps."""
QUIET, BUSY, LENGTH, PHASE = 6, 45, 50, 250
"""Mean numbers of rows in the quiet and in the busy phases, mean tokens of an answer, and steps of a phase."""


def decode_sizes(rng: random.Random) -> list[int]:
    """Return the number of rows of each step. In each step a row ends with the probability 1/`LENGTH`."""
    rows, sizes = QUIET, []
    for step in range(STEPS):
        rows -= sum(rng.random() < 1 / LENGTH for _ in range(rows))
        mean = BUSY if step // PHASE % 2 else QUIET
        rows += sum(rng.random() < 1 / LENGTH for _ in range(mean))
        rows = min(max(rows, 1), MOST_ROWS)
        sizes.append(rows)
    return sizes


def padding(student: Student) -> tuple[float, int, int]:
    """Return the rows of padding of the steps, the graphs that were recorded, and the steps that would run eagerly.

    The steps are new in each run, and the rows of padding are relative to those of buckets that double.
    """
    runner = student.make(device=torch.device("cpu"))
    rig = GraphRig(runner, MOST_ROWS)
    padded = eager = doubled = 0
    for rows in decode_sizes(student.random):
        doubled += (1 << (rows - 1).bit_length()) - rows
        key = runner.pick(rows, 1, True)
        if key is None:
            eager += 1
        else:
            padded += key.rows - rows
    return padded / doubled, len(rig.inputs), eager
