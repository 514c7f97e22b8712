"""The core's layers with a `GroupedWeight` for each of their matrices: linear layers, embedding and LM head.

Where the integers come from is not known here: each layer gets a function `Read`, which reads a slice of a checkpoint's
tensor. A merged layer has one matrix for each part if the parts have different forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.layers.weight_shards import WeightShard, WeightSource
from minisgl.plugins.kernels.ops.cpp.decoder_layers import PRODUCTS, Product, grouped_product
from minisgl.plugins.kernels.ops.grouped import GroupedWeight, dequantize, grouped_linear, join

__all__ = ["GroupedEmbedding", "GroupedLayer", "Read", "convert_layers"]

Read = Callable[[WeightShard, WeightSource], GroupedWeight]
"""Reads the slice that a shard describes. The shard's target has no memory."""


@dataclass(frozen=True, slots=True)
class GroupedShard(WeightShard):
    """A slice that ``read`` turns into a `GroupedWeight`, which ``receive`` gets."""

    read: Read
    receive: Callable[[int, GroupedWeight], None]
    number: int

    def load(self, source: WeightSource) -> None:
        """Read the slice, and pass it on."""
        self.receive(self.number, self.read(self, source))


class GroupedLayer(nn.Module):
    """What the layers have in common: ``matrices`` in place of the parameter ``weight``."""

    matrices: list[GroupedWeight]
    weight: nn.Parameter

    def give_up_weight(self, read: Read, dtype: torch.dtype) -> None:
        """Delete the weight. ``dtype`` is that of activations."""
        self.read, self.dtype = read, dtype
        self.found: dict[int, GroupedWeight] = {}
        self.target = torch.empty_like(self.weight, device="meta")
        del self.weight

    def grouped(self, shard: WeightShard, number: int = 0) -> GroupedShard:
        """Return ``shard`` as one whose numbers become matrix ``number``."""
        return GroupedShard(shard.name, shard.shape, shard.index, shard.target, self.read, self.receive, number)

    def num_matrices(self) -> int:
        """Return the number of matrices that a checkpoint has for this layer."""
        return 1

    def receive(self, number: int, matrix: GroupedWeight) -> None:
        """Keep a matrix. When the layer has all of them, join those that fit together.

        So at most one layer's matrices are in memory twice.
        """
        self.found[number] = matrix
        if len(self.found) == self.num_matrices():
            self.matrices = join([self.found[number] for number in sorted(self.found)])
            self.found.clear()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [rows, columns] with all matrices, and add the bias; returns [rows, sum of outputs].

        Each product adds its part of the bias before it rounds to x's dtype.
        """
        if len(self.matrices) == 1:
            return grouped_linear(x, self.matrices[0], bias)
        sizes = [matrix.outputs for matrix in self.matrices]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat([grouped_linear(x, *each) for each in zip(self.matrices, biases, strict=True)], dim=1)


class GroupedMerged(GroupedLayer):
    """A merged column-parallel layer."""

    parts: tuple[tuple[str, int, int, int], ...]
    bias: nn.Parameter | None
    full_names: Callable[[str], list[str]]

    def num_matrices(self) -> int:
        return len(self.parts)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's rows of each part, and of the bias."""
        begin = 0
        for number, full in enumerate(self.full_names(prefix)):
            _, total, start, here = self.parts[number]
            shape, rows = (total, self.target.shape[1]), slice(begin, begin + here)
            yield self.grouped(WeightShard.part(f"{full}.weight", shape, 0, start, self.target[rows]), number)
            if self.bias is not None:
                yield WeightShard.part(f"{full}.bias", (total,), 0, start, self.bias[rows])
            begin += here

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in] with all parts: see `minisgl.layers.linear.Merged`."""
        return self.multiply(x, self.bias)


class GroupedColParallelMerged(GroupedMerged, LinearColParallelMerged):
    """`LinearColParallelMerged` of integers."""


class GroupedQKVMerged(GroupedMerged, LinearQKVMerged):
    """`LinearQKVMerged` of integers."""


class GroupedRowParallel(GroupedLayer, LinearRowParallel):
    """`LinearRowParallel` of integers."""

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's columns of the weight, and the whole bias."""
        out_size, here = self.target.shape
        start = self.comm.rank * here
        yield self.grouped(WeightShard.part(f"{prefix}weight", (out_size, self.in_size), 1, start, self.target))
        if self.bias is not None:
            yield WeightShard.whole(f"{prefix}bias", self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in / size]: see `LinearRowParallel`."""
        y = self.multiply(x, self.bias if self.comm.rank == 0 else None)
        return self.comm.all_reduce(y) if self.reduce else y


class GroupedVocab(GroupedLayer):
    """This rank's rows of the vocabulary. ``target`` may have memory, to compare tied tensors of a checkpoint."""

    vocab_size: int

    def give_up_weight(self, read: Read, dtype: torch.dtype) -> None:
        super().give_up_weight(read, dtype)
        self.rows = len(self.target)  # with padding
        self.target = self.target[: max(0, self.vocab_size - self.first())]

    def first(self) -> int:
        """Return the first row of this rank."""
        start: int = self.start  # type: ignore[assignment]
        return min(start, self.vocab_size)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's rows, without the padding."""
        shape = (self.vocab_size, self.target.shape[1])
        yield self.grouped(WeightShard.part(f"{prefix}weight", shape, 0, self.first(), self.target))

    def after_load(self) -> None:
        """Free what `GroupedEmbedding.keep_numbers` allocated. There is no padding to set to zeros."""
        self.target = self.target.to("meta")


class GroupedEmbedding(GroupedVocab, VocabParallelEmbedding):
    """`VocabParallelEmbedding` of integers: only the rows of a step's tokens are dequantised."""

    def keep_numbers(self) -> None:
        """Keep the numbers as they were before they are quantised, until all weights are loaded."""
        self.target = torch.empty(self.target.shape, dtype=self.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens [n]: see `VocabParallelEmbedding`."""
        if self.comm.size == 1:
            return dequantize(self.matrices[0], tokens).to(self.dtype)
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.matrices[0].outputs)
        found = dequantize(self.matrices[0], local.masked_fill_(elsewhere, 0)).to(self.dtype)
        return self.comm.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))


class GroupedHead(GroupedVocab, ParallelLMHead):
    """`ParallelLMHead` of integers, its own or those of ``embedding``: a list, because it is no module of the head."""

    embedding: list[GroupedEmbedding]

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's rows, unless they are the embedding's."""
        return iter(()) if self.tied else super().weight_shards(prefix, names)

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, rows of this rank, with padding]."""
        matrices = self.embedding[0].matrices if self.tied else self.matrices
        logits = grouped_linear(hidden, matrices[0])
        return F.pad(logits, (0, self.rows - logits.shape[1])) if logits.shape[1] < self.rows else logits


LAYERS: dict[type, type[GroupedLayer]] = {
    LinearColParallelMerged: GroupedColParallelMerged,
    LinearQKVMerged: GroupedQKVMerged,
    LinearRowParallel: GroupedRowParallel,
    VocabParallelEmbedding: GroupedEmbedding,
    ParallelLMHead: GroupedHead,
}
"""The core's layers → the same of integers."""


def _product_in_cpp(layer: Any) -> Product:
    return grouped_product(layer.matrices, layer.bias, layer.dtype)


PRODUCTS.update(dict.fromkeys((GroupedColParallelMerged, GroupedQKVMerged, GroupedRowParallel), _product_in_cpp))


def convert_layers(model: nn.Module, read: Read, dtype: torch.dtype, serves: Callable[[WeightShard], bool]) -> None:
    """Convert each layer that is exactly one of the core's, if ``serves`` accepts the shards of all of its matrices.

    A tied LM head is converted with its embedding.
    """
    prefixes: dict[str, Any] = {f"{name}.": module for name, module in model.named_modules() if type(module) in LAYERS}
    embeddings = {id(m.weight): m for m in prefixes.values() if type(m) is VocabParallelEmbedding}
    heads: list[tuple[Any, Any]] = [
        (m, embeddings[id(m.weight)]) for m in prefixes.values() if type(m) is ParallelLMHead and m.tied
    ]
    for prefix, module in prefixes.items():
        shards = [shard for shard in module.weight_shards(prefix, None) if len(shard.shape) > 1]
        if shards and all(serves(shard) for shard in shards):
            _convert(module, read, dtype)
    for head, embedding in heads:
        if isinstance(embedding, GroupedEmbedding):
            _convert(head, read, dtype)
            head.embedding = [embedding]


def _convert(module: Any, read: Read, dtype: torch.dtype) -> None:
    module.__class__ = LAYERS[type(module)]
    module.give_up_weight(read, dtype)
