"""The tensors of a GGUF file as a checkpoint with Hugging Face's names."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard
from minisgl.models.weights import Checkpoint
from minisgl.plugins.kernels.ops.grouped import GroupedWeight, row_slices
from minisgl.plugins.quantization.ggml.config import GgufTensor, tensors_of
from minisgl.plugins.quantization.ggml.header import read_header
from minisgl.plugins.quantization.ggml.integers import FORMS, grouped
from minisgl.plugins.quantization.ggml.types import dequantize

__all__ = ["GgufCheckpoint"]


class GgufCheckpoint(Checkpoint):
    """A GGUF file, which is mapped into memory. Its pages are read when a slice is filled, and then released.

    Raises `ConfigError` if the file can't be read.
    """

    def __init__(self, file: Path):
        self.path, self.bytes_read = file, 0
        self.beside = {}
        self._tensors = tensors_of(read_header(file))
        try:
            mapped = np.memmap(file, np.uint8, "c")  # "c": torch wants memory that it may write
        except OSError as error:
            raise ConfigError(f"{file} can't be read: {error.strerror}.") from None
        self._data = torch.from_numpy(mapped)
        self._mapping: Any = mapped.base  # mmap.mmap

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        del self._data, self._mapping

    @property
    def names(self) -> frozenset[str]:
        """The names that the tensors have in a Hugging Face checkpoint."""
        return frozenset(self._tensors)

    def find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """Return the tensor ``name``. Raises `ConfigError` if it has another shape than ``shape``."""
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise ConfigError(
                f"{self.path}: the tensor {tensor.stored.name} has shape {list(tensor.shape)}, but its metadata "
                f"implies {list(shape)}."
            )
        return tensor

    def rows(self, tensor: GgufTensor, begin: int, end: int) -> Tensor:
        """Return the rows ``begin`` to ``end`` of a tensor as they are stored, [rows, bytes], uint8.

        The rows of query and key heads are brought into the order of Hugging Face.
        """
        stored = tensor.stored
        count = tensor.shape[0] if len(tensor.shape) > 1 else 1
        first = stored.begin + tensor.expert * count * stored.row_size
        data = self._data[first : first + count * stored.row_size].view(count, stored.row_size)
        self.bytes_read += (end - begin) * stored.row_size
        if not tensor.heads or len(tensor.shape) == 1:
            return data[begin:end]
        return data[_row_order(count, tensor.heads)[begin:end]]

    def serves_grouped(self, shard: WeightShard) -> bool:
        """Return whether `grouped` can read the shard: its type has integers, and its columns are whole blocks.

        The shard may have the module's own name, which lacks the beginning ``model.``.
        """
        tensor = self._tensors.get(shard.name) or self._tensors.get(f"model.{shard.name}")
        if tensor is None or tensor.stored.block.name not in FORMS or len(shard.shape) != 2:
            return False
        size: int = tensor.stored.block.elements
        return bool(shard.index[1].start % size == 0 and shard.index[1].stop % size == 0)

    def grouped(self, shard: WeightShard) -> GroupedWeight:
        """Return the shard's slice as the file's integers. Raises `ConfigError` if the tensor has another shape."""
        tensor = self.find(shard.name, shard.shape)
        block, (rows, columns) = tensor.stored.block, shard.index
        begin, end = (at // block.elements * block.size for at in (columns.start, columns.stop))
        shape = rows.stop - rows.start, columns.stop - columns.start
        try:
            return grouped(block.name, *shape, (data[:, begin:end] for _, data in self._slices(tensor, rows)))
        except ValueError as error:
            raise ConfigError(
                f"{self.path}: the tensor {tensor.stored.name} can't stay quantised: {error}. Use quantization=gguf "
                "quantization.weights=dequantized."
            ) from None

    def fill(self, shard: WeightShard) -> None:
        """Dequantise the shard's slice into its target. Raises `ConfigError` if the tensor has another shape."""
        tensor = self.find(shard.name, shard.shape)
        block = tensor.stored.block.name
        if len(tensor.shape) == 1:
            values = dequantize(block, self.rows(tensor, 0, 1).contiguous(), tensor.shape[0])[0]
            if tensor.heads:
                values = values[_row_order(len(values), tensor.heads)]
            shard.target.copy_(values[shard.index[0]])
            return
        rows, columns = shard.index
        for part, data in self._slices(tensor, rows):
            values = dequantize(block, data.contiguous(), tensor.shape[1])
            shard.target[part.start - rows.start : part.stop - rows.start].copy_(values[:, columns])

    def _slices(self, tensor: GgufTensor, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of ``rows`` and what is stored in them. Their memory is released when the next one is asked for.

        So the file's pages and what is made of them are not in memory together. A page that is read again is the same.
        """
        stored = tensor.stored
        begin = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
        for part in row_slices(rows.start, rows.stop, tensor.shape[1]):
            yield part, self.rows(tensor, part.start, part.stop)
            if hasattr(mmap, "MADV_DONTNEED"):
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, stored.begin + stored.size - begin)


def _row_order(rows: int, heads: int) -> Tensor:
    """Return the stored row of each row of Hugging Face's order.

    A head's stored rows are pairs of neighbours: number i of the first half, then number i of the second half.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
