"""Counts the torch operations of a student's attention in a decode step. On a GPU, each is at least one kernel launch.

Views are not counted: they compute nothing. `HostAccess` tells whether the code left torch, where nothing is counted.
`DeviceReads` tells whether the host reads tensors for which it would wait on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.chapters.lab.grader.gate import Broken, Student
from minisgl.testing.attention import AttentionCase, prepare_case

__all__ = ["ROWS", "DeviceReads", "HostAccess", "Operations", "operations_of_a_decode_step"]

ROWS = 16
_LEAVES_TORCH = ("numpy", "__array__", "tolist", "__dlpack__")
_WAITS = (*_LEAVES_TORCH, "item", "cpu", "__int__", "__float__", "__bool__", "__index__", "is_nonzero", "equal",
          "allclose", "nonzero", "argwhere", "masked_select", "unique")  # fmt: skip


class Operations(TorchDispatchMode):
    """A dispatch mode that counts in ``number`` the operations that compute or copy something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the base class would import torch's compiler, which takes a second and is not needed

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [each.alias_info for each in function._schema.returns]
        self.number += not any(alias is not None and not alias.is_write for alias in returned)
        return function(*args, **(kwargs or {}))


class HostAccess(TorchFunctionMode):
    """A torch function mode for the methods through which Python or numpy reads a whole tensor.

    ``name`` is the last of them that was called, and ``number`` the number of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name, self.number = "", 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in _LEAVES_TORCH:
            self.name = function.__name__
            self.number += 1
        return function(*args, **(kwargs or {}))


class DeviceReads(TorchFunctionMode):
    """A torch function mode that records in ``name`` the first function with which the host reads a device's tensor.

    On a GPU the host would wait for the device. The memory of ``tensors``, all that is computed from it, and tensors
    that are made with an argument ``device`` are taken for memory of a device, wherever they are.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.name = ""
        self._tensors = list(tensors)  # they are kept, so that their addresses stay theirs
        self._memory = {x.untyped_storage().data_ptr() for x in self._tensors}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given = [y for x in given for y in (x if isinstance(x, (list, tuple)) else [x])]  # torch.cat has a list
        ours = [x for x in given if isinstance(x, Tensor) and self._is_ours(x)]
        name = getattr(function, "__name__", "")
        chosen = name in ("__getitem__", "__setitem__") and any(x.dtype == torch.bool for x in ours)
        down = name == "copy_" and not self._is_ours(args[0])  # from the device to memory of the host
        if ours and (name in _WAITS or chosen or down):
            self.name = self.name or name
        result = function(*args, **(kwargs or {}))
        if ours or (kwargs or {}).get("device") is not None:
            made = result if isinstance(result, (list, tuple)) else [result]
            self._tensors += [x for x in made if isinstance(x, Tensor)]
            self._memory |= {x.untyped_storage().data_ptr() for x in made if isinstance(x, Tensor)}
        return result

    def _is_ours(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._memory


def operations_of_a_decode_step(student: Student) -> tuple[int, str]:
    """Return the number of operations of ``plan`` and one layer, and the method through which the code left torch.

    The step has `ROWS` rows of different lengths. Raise `Broken` if the answer is wrong.
    """
    rng = random.Random(0)
    rows = tuple((rng.randint(20, 400), 1) for _ in range(ROWS))
    prepared = prepare_case(AttentionCase(rows, head_dim=16), seed=0)
    backend = student.make(device=torch.device("cpu"))
    backend.bind(prepared.pool, prepared.layers, [])
    out = torch.full_like(prepared.q, torch.nan)
    with HostAccess() as host, Operations() as operations:
        backend.plan(prepared.batch)
        got = backend.forward(prepared.layers[1], prepared.q, out)
    if not torch.allclose(got.double(), prepared.expected, atol=1e-4, rtol=1e-4):
        raise Broken("answer", "The answer is that of dense attention.", f"A step of {ROWS} decode rows was wrong.")
    return operations.number, host.name
