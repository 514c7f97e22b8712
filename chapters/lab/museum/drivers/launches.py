"""A Triton kernel, which is run by Triton's interpreter. A call is a launch: the numbers of its rows and of a row.

The trace has a line for each access: ``places`` are those of the tile, and ``numbers`` those that are not masked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minisgl.chapters.lab.gates.fuse import Launch, judge, make_rows
from minisgl.chapters.lab.grader.kernel_accesses import Accesses
from minisgl.chapters.lab.museum.calls import Note, load_plugins
from minisgl.chapters.lab.museum.pieces import NAME

SYMPTOM = "A row would get another result than it gets alone."


def load(file: Path) -> Any:
    """Return the launcher of a plugin file."""
    manager = load_plugins(file)
    return manager.build("kernels", manager.make("kernels", NAME), device=torch.device("cpu")).launcher


def start(launcher: Any, workload: Mapping[str, Any]) -> Any:
    """Return the launcher: it keeps nothing of earlier launches."""
    return launcher


def call(launcher: Any, sizes: Any, note: Note) -> dict[str, int]:
    """Run one launch: ``[rows, numbers of a row]``, or what `make_rows` returns. Return the bytes that it moves."""
    if isinstance(sizes, list):
        sizes = {"rows": sizes[0], "dim": sizes[1], "gap": 0, "scale": 0, "dtype": 0, "seed": 1}
    case = Launch(sizes, with_residual=False)
    with Accesses(case.x, {"weight": case.weight}) as accesses:
        out = launcher.norm(case.x, case.weight, case.eps)
    starts = {"x": accesses.x, "weight": case.weight, "out": accesses.made[-1] if accesses.made else out}
    for pointers, mask, is_store in accesses.log:
        at = int(pointers.min())
        name = next((n for n, each in starts.items() if 0 <= at - each.data_ptr() < each.nbytes), "none")
        first = (at - starts[name].data_ptr()) // starts[name].element_size() if name in starts else None
        note(rows=sizes["rows"], dim=sizes["dim"], tensor=name, access="store" if is_store else "load", first=first,
             places=pointers.size, numbers=int(mask.sum()))  # fmt: skip
    judge(case, out, None, accesses)
    accesses.raise_first()
    accesses.check_reads()
    return {"moved": accesses.nbytes}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random launch."""
    return {"calls": [make_rows(rng, number)]}
