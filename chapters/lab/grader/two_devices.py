"""Tells on a CPU what would happen if some tensors were on a GPU: `TwoDevices`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["TwoDevices"]

_MOVES = ("to", "cuda", "cpu", "copy_", "type_as")
_MAY_MIX = (*_MOVES, "__getitem__", "__setitem__", "index_put_")  # an index or a value may be on the host


class TwoDevices(TorchFunctionMode):
    """A torch function mode that follows which tensors would be on a GPU and which in the host's memory.

    On the GPU are the tensors ``on_device``, all tensors that are made with an argument ``device``, and all that are
    computed from them. In the host's memory are the tensors that are made without this argument. Nothing is known of
    tensors that were made while the mode was off.

    ``mixed`` is the first function that computes with tensors of both, which fails with a GPU. ``waits`` is the first
    function within `watch` that copies more than one number to the GPU and does not pass ``non_blocking=True``, so the
    host waits for the copy.
    """

    def __init__(self, on_device: Iterable[Tensor] = ()):
        super().__init__()
        self.given = list(on_device)
        self.mixed = self.waits = ""
        self._watched = False
        self._kept: list[Tensor] = []  # so that no other tensor gets their addresses
        self._on_device: dict[int, bool] = {}  # address of a tensor's memory -> whether it is on the GPU
        for x in self.given:
            self._note(x, True)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that would be on the GPU."""
        return [x for x in self._kept if self._place(x)]

    def on_host(self, x: Tensor) -> bool:
        """Return whether a tensor would be in the host's memory."""
        return self._place(x) is False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the calls of a block, and record in ``waits`` a copy for which the host waits."""
        self._watched = True
        try:
            with self.follow():
                yield
        finally:
            self._watched = False

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow the calls of a block."""
        real = torch.from_numpy  # torch calls no mode for this function

        def from_numpy(array: Any) -> Tensor:
            return self._note(real(array), False)

        with patch.object(torch, "from_numpy", from_numpy), self:
            yield

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        given = [y for x in (*args, *kwargs.values()) for y in (x if isinstance(x, (list, tuple)) else [x])]
        tensors = [x for x in given if isinstance(x, Tensor)]
        places = {self._place(x) for x in tensors if x.ndim} - {None}
        named = not tensors and any(isinstance(x, torch.device) for x in given)
        to_device = name == "cuda" or (name == "to" and self._names_a_device([*args[1:], *kwargs.values()]))
        moved = to_device and self._place(args[0]) is False
        if self._watched and not self.waits and self._waits(name, args, kwargs, moved):
            self.waits = name
        result = function(*args, **kwargs)
        made = [x for x in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(x, Tensor)]
        if made and len(places) == 2 and name not in _MAY_MIX:
            self.mixed = self.mixed or name
        for x in made:
            if moved or kwargs.get("device") is not None or named:
                self._note(x, True)
            elif self._place(x) is None and (True in places or not tensors or False in places):
                self._note(x, True in places)
        return result

    @staticmethod
    def _names_a_device(given: list[Any]) -> bool:
        return any(isinstance(x, (str, torch.device, Tensor)) for x in given)

    def _waits(self, name: str, args: Any, kwargs: Any, moved: bool) -> bool:
        """Return whether a call copies from the host to the GPU, and the host waits."""
        if moved:
            return not kwargs.get("non_blocking", any(x is True for x in args[1:])) and args[0].numel() > 1
        if name in ("tensor", "as_tensor"):
            data = args[0] if args else kwargs.get("data")
            return kwargs.get("device") is not None and not isinstance(data, Tensor) and np.size(data) > 1
        if name not in ("copy_", "__setitem__") or self._place(args[0]) is not True:
            return False
        source = args[-1] if name == "__setitem__" else args[1] if len(args) > 1 else kwargs.get("src")
        if not isinstance(source, Tensor) or self._place(source) is not False or source.numel() < 2:
            return False
        return name == "__setitem__" or not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)

    def _place(self, x: Any) -> bool | None:
        # Tensors without elements have no address of their own, so nothing is known of them.
        return self._on_device.get(x.untyped_storage().data_ptr() or -1) if isinstance(x, Tensor) else None

    def _note(self, x: Tensor, on_device: bool) -> Tensor:
        self._kept.append(x)
        self._on_device[x.untyped_storage().data_ptr()] = on_device
        return x
