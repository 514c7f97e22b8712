"""The numbers of rows of 20,000 decode steps of a server that has one user, a few users, or many.

They show how much padding the buckets of a graph runner cost: a step's rows of padding, divided by its rows.
"""

from __future__ import annotations

import random
from collections import Counter

import torch

from minisgl.chapters.lab.grader.gate import Student
from minisgl.testing.graph import GraphRig

__all__ = ["FEW", "MANY", "MOST_ROWS", "STEPS", "decode_sizes", "padding"]

MOST_ROWS, STEPS = 64, 20_000
"""``max_running_requests`` of the server, and the number of steps."""
FEW, MANY, LENGTH, PHASE = 6, 45, 50, 250
"""Mean numbers of rows with few and with many users, mean tokens of an answer, and steps of a phase."""


def decode_sizes(rng: random.Random) -> list[int]:
    """Return the number of rows of each step. In each step a row ends with the probability 1/`LENGTH`."""
    rows, sizes = {1: 1, FEW: FEW, MANY: MANY}, []
    for step in range(STEPS):
        mean = (1, FEW, MANY)[step // PHASE % 3]
        if mean > 1:
            rows[mean] -= sum(rng.random() < 1 / LENGTH for _ in range(rows[mean]))
            rows[mean] += sum(rng.random() < 1 / LENGTH for _ in range(mean))
            rows[mean] = min(max(rows[mean], 1), MOST_ROWS)
        sizes.append(rows[mean])
    return sizes


def padding(student: Student) -> tuple[float, int, int]:
    """Return the padding of the steps, the graphs that were recorded, and the steps that would run eagerly.

    The steps are new in each run, and their padding is relative to that of buckets that double.
    """
    runner = student.make(device=torch.device("cpu"))
    rig = GraphRig(runner, MOST_ROWS)
    padded = doubled = 0.0
    eager = 0
    for rows, steps in Counter(decode_sizes(student.random)).items():
        doubled += steps * ((1 << (rows - 1).bit_length()) / rows - 1)
        key = runner.pick(rows, 1, True)
        if key is None:
            eager += steps
        else:
            padded += steps * (key.rows / rows - 1)
    return padded / doubled, len(rig.inputs), eager
