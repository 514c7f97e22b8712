"""Records every load and store of Triton's interpreter, for lab `fuse`: what is read, how often, and from where.

A load or store outside of the tensors is not executed: it is a finding. Masked places of a load without ``other``
become NaN, since a GPU promises no value there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.chapters.lab.grader.gate import Broken, amount

__all__ = ["Accesses"]


class Accesses:
    """A context in which the interpreter's accesses are recorded. ``x`` may have rows with gaps.

    ``others`` are further tensors that are read. Tensors that the code makes in the context may be read and written.
    ``nbytes`` counts the bytes that are read and written. ``poisoned``: a masked place without ``other`` was read.
    ``log`` has each access, as its pointers and their mask, both as wide as the tile, and whether it was a store.
    """

    def __init__(self, x: Tensor, others: dict[str, Tensor | None]):
        self.x, self.others = x, {name: each for name, each in others.items() if each is not None}
        self.reads: Counter[int] = Counter()
        self.written: set[int] = set()
        self.nbytes, self.poisoned = 0, False
        self.finding: Broken | None = None
        self.made: list[Tensor] = []
        self.log: list[tuple[Any, Any, bool]] = []
        self.back = 0
        self.x_addresses = self.addresses(x)
        self.known = np.unique(np.concatenate([self.addresses(each).ravel() for each in (x, *self.others.values())]))

    @staticmethod
    def addresses(tensor: Tensor) -> Any:
        """Return the address of each number of a tensor [rows, columns], or of a vector."""
        size = tensor.element_size()
        found = np.array(tensor.data_ptr(), np.int64)
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            found = found[..., None] + np.arange(length) * stride * size
        return found

    def __enter__(self) -> Accesses:
        from triton.runtime import interpreter

        self.builder: Any = type(interpreter.interpreter_builder)
        self.kept = self.builder.create_masked_load, self.builder.create_masked_store, torch.empty
        handle, dtype_of = interpreter.TensorHandle, interpreter._get_np_dtype

        def load(builder: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
            self.log.append((ptrs.data, np.broadcast_to(mask.data, ptrs.data.shape).astype(bool), False))
            inside = self.check(ptrs.data, mask.data, "read")
            dtype = ptrs.get_element_ty()
            if other is None:
                number = dtype_of(dtype)
                known = ptrs.data.size == 1  # of one place, the interpreter takes ``other=0.0`` for none
                fill = np.nan if np.issubdtype(number, np.floating) and not known else 0
                other = handle(np.full(ptrs.data.shape, fill, number), dtype)
                self.poisoned |= not known and not bool(np.all(mask.data))
            addresses = ptrs.data[inside].tolist()
            self.reads.update(addresses)
            self.back += sum(address in self.written for address in addresses)
            self.nbytes += len(addresses) * np.dtype(dtype_of(dtype)).itemsize
            return self.kept[0](builder, ptrs, handle(inside, mask.dtype), other, *rest)

        def store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.log.append((ptrs.data, np.broadcast_to(mask.data, ptrs.data.shape).astype(bool), True))
            inside = self.check(ptrs.data, mask.data, "written")
            addresses = ptrs.data[inside].tolist()
            self.written.update(addresses)
            self.nbytes += len(addresses) * np.dtype(dtype_of(ptrs.get_element_ty())).itemsize
            return self.kept[1](builder, ptrs, value, handle(inside, mask.dtype), *rest)

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = self.kept[2](*args, **kwargs)
            self.made.append(made)
            self.known = np.union1d(self.known, self.addresses(made).ravel())
            return made

        self.builder.create_masked_load, self.builder.create_masked_store, torch.empty = load, store, empty
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.builder.create_masked_load, self.builder.create_masked_store, torch.empty = self.kept
        while error is not None:  # the interpreter wraps what the kernel raised
            if isinstance(error, NotImplementedError):
                raise error
            error = error.__cause__ or error.__context__

    def check(self, pointers: Any, mask: Any, what: str) -> Any:
        """Return which of the accesses are inside of a tensor. Keep the first one that is not."""
        mask = np.broadcast_to(mask, pointers.shape).astype(bool)  # it may be of integers
        known = self.known[np.searchsorted(self.known, pointers).clip(max=len(self.known) - 1)] == pointers
        outside = mask & ~known
        if outside.any() and self.finding is None:
            number = int(outside.sum())
            seen = f"{amount(number, 'number')} that {'belongs' if number == 1 else 'belong'} to no row and column "
            seen += f"{'was' if number == 1 else 'were'} {what}: of {int(mask.sum())} in one access."
            close = self.x_addresses[0, 0] + np.arange(self.x_addresses.size) * self.x.element_size()
            dense = len(self.x) > 1 and self.x.stride(0) != self.x.shape[1]
            is_dense = dense and set(pointers[mask].tolist()) <= set(close.tolist())
            promise = "A kernel reads and writes numbers of its tensors, and no others."
            cause = "stride" if is_dense else "gaps" if self._has_gaps_of_x(pointers[mask]) else "mask"
            self.finding = Broken(cause, promise, seen)
        return mask & known

    def _has_gaps_of_x(self, pointers: Any) -> bool:
        """Return whether the pointers are those of a tensor without gaps, but with the distance of rows of x."""
        if self.x.stride(0) == self.x.shape[1]:
            return False
        rows, columns = self.x.shape
        places = np.arange(rows)[:, None] * self.x.stride(0) + np.arange(columns)
        dense = [each for each in (*self.others.values(), *self.made) if each.dim() == 2]
        return any(bool(np.isin(pointers, each.data_ptr() + places * each.element_size()).all()) for each in dense)

    def raise_first(self) -> None:
        """Raise the first finding."""
        if self.finding is not None:
            raise self.finding

    def unwritten(self, result: Tensor) -> int:
        """Return how many numbers of a result were not written."""
        return sum(address not in self.written for address in self.addresses(result).ravel().tolist())

    def check_reads(self) -> None:
        """Raise `Broken` if a number of x or residual was read twice, or a result was read."""
        if self.back:
            seen = f"{amount(self.back, 'number')} were read after the kernel had written them."
            raise Broken("back", "Nothing that was written is read.", seen)
        for name, each in (("x", self.x), ("residual", self.others.get("residual"))):
            if each is not None:
                most = max(self.reads[address] for address in self.addresses(each).ravel().tolist())
                if most > 1:
                    seen = f"A number of `{name}` was read {most} times."
                    raise Broken("twice", "Each number of x and of residual is read once.", seen)
