"""Counts what a GPU would launch: torch operations that compute or copy something, and kernels of minisgl.

A function of minisgl marked `one_launch` is one launch, whatever it does on this machine. A function of the student is
not, even if it is marked: its torch operations are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from minisgl.chapters.lab.grader.gate import Broken, Student
from minisgl.chapters.lab.grader.torch_operations import HostAccess, Operations
from minisgl.plugins.kernels.ops.launch import recording
from minisgl.testing.moe import MoeCase, problem

__all__ = ["EXPERTS", "TOKENS", "TOP_K", "Launches", "launches_of_experts"]

TOKENS, TOP_K, EXPERTS = 8, 4, 64
"""The decode step of `launches_of_experts`."""


class Launches(Operations):
    """A dispatch mode that counts launches in ``number``. Allocations and views are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = 0  # how many functions marked `one_launch` are running
        self._marked = ExitStack()

    def __enter__(self) -> Any:
        self._marked.enter_context(recording(self._launch))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._marked.close()

    def _launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not function.__module__.startswith(("minisgl.", "torch.")):
            return function(*args, **kwargs)
        self.number += not self._inside
        self._inside += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._inside -= 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if self._inside or "empty" in name:
            return function(*args, **(kwargs or {}))
        self.number += name == "lift_fresh"  # a tensor made from host values is copied to the device
        return super().__torch_dispatch__(function, types, args, kwargs)


def launches_of_experts(student: Student) -> int:
    """Return the launches of the student's experts in a decode step, and the copies of tensors to lists.

    `TOKENS` tokens choose `TOP_K` of `EXPERTS` experts each. Raise `Broken` if the result is wrong.
    """
    given = problem(MoeCase(TOKENS, top_k=TOP_K, experts=EXPERTS))
    backend = student.make(device=torch.device("cpu"))
    weights = backend.load(given.gate_up, given.down, given.local_experts, "silu")
    out = torch.full_like(given.x, torch.nan)
    launches = Launches()
    with HostAccess() as host, launches:
        got = backend.forward(weights, given.x, given.ids, given.scale, out)
    if not torch.allclose(got.double(), given.answer(), atol=1e-4):
        raise Broken("lost", "Each token gets the weighted sum of the experts that it chose.", "A token is wrong.")
    return launches.number + int(host.number)
