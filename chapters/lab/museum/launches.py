"""Runs the kernel of a piece under Triton's interpreter: on the launches of the piece, and on random ones.

A workload has ``launches``, each with the rows and the numbers of a row. The trace has a JSON line for each access of
each launch: ``step`` is the number of the launch, ``places`` those of the tile, ``numbers`` those that are not masked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.chapters.lab.gates.fuse import Launch, judge, make_rows
from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.grader.kernel_accesses import Accesses
from minisgl.chapters.lab.museum.pieces import NAME, Piece
from minisgl.plugin_manager.manager import PluginManager

__all__ = ["play_launches", "show_launches"]

SYMPTOM = {
    True: "All rows got their right results.",
    False: "A row would get another result than it gets alone.",
}


def launcher_of(file: Path) -> Any:
    """Return the launcher of a plugin file."""
    manager = PluginManager()
    manager.add(str(file))
    return manager.build("kernels", manager.make("kernels", NAME), device=torch.device("cpu")).launcher


def launches_of(piece: Piece) -> list[dict[str, Any]]:
    """Return the launches of the piece's workload."""
    common = {"gap": 0, "scale": 0, "dtype": 0, "seed": 1}
    return [{"rows": rows, "dim": dim, **common} for rows, dim in piece.workload["launches"]]


def launch(launcher: Any, sizes: dict[str, Any]) -> tuple[Accesses, Broken | None]:
    """Run one launch. Return its accesses, and what is wrong with them or with its result."""
    case = Launch(sizes, with_residual=False)
    with Accesses(case.x, {"weight": case.weight}) as accesses:
        out = launcher.norm(case.x, case.weight, case.eps)
    try:
        judge(case, out, None, accesses)
        accesses.raise_first()
        accesses.check_reads()
    except Broken as broken:
        return accesses, broken
    return accesses, None


def show_launches(piece: Piece, file: Path, trace: Path) -> dict[str, Any]:
    """Run the piece's launches, and write their accesses. Return what an operator sees."""
    launcher, lines, is_right = launcher_of(file), [], True
    for step, sizes in enumerate(launches_of(piece), 1):
        accesses, broken = launch(launcher, sizes)
        is_right &= broken is None
        starts = {"x": accesses.x, "weight": accesses.others["weight"], "out": accesses.made[-1]}
        for pointers, mask, is_store in accesses.log:
            at = int(pointers.min())
            name = next((n for n, each in starts.items() if 0 <= at - each.data_ptr() < each.nbytes), "none")
            first = (at - starts[name].data_ptr()) // 4 if name in starts else None
            entry = {"step": step, "rows": sizes["rows"], "dim": sizes["dim"], "tensor": name}
            entry |= {"access": "store" if is_store else "load", "first": first}
            lines.append(json.dumps(entry | {"places": pointers.size, "numbers": int(mask.sum())}))
    trace.write_text("\n".join(lines) + "\n", "utf-8")
    return {"symptom": SYMPTOM[is_right], "launches": len(launches_of(piece))}


def play_launches(piece: Piece, file: Path, seed: int, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the bytes that a plugin moves in the piece's launches and in random ones, or what it breaks."""
    launcher, moved = launcher_of(file), {"own": 0, "random": 0}
    drawn = [make_rows(random.Random(f"{seed} {number}"), number) for number in numbers]
    for where, cases in (("own", launches_of(piece)), ("random", drawn)):
        for step, sizes in enumerate(cases, 1):
            accesses, broken = launch(launcher, sizes)
            if broken is not None and where == "own":
                return {"broken": f"promise 8 is still broken in step {step}: {broken.promise} {broken.seen}"}
            if broken is not None:
                return {"broken": f"Random launch {step} of seed {seed}: {broken.promise} {broken.seen}"}
            moved[where] += accesses.nbytes
    return {where: {"moved": count} for where, count in moved.items()}
