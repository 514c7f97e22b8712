"""`moe=grouped`: experts as grouped matrix products in plain torch: sort, multiply, scatter. To be read.

The same three steps as the Triton kernels of moe=triton, with the blocks that a GPU multiplies; one expert's rows
stand together, so an expert is read once however many tokens chose it, and one that nobody chose is not read at all.
Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022. Counts rows on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.moe import MoeBackend


@dataclass
class Grouped:
    """Sort by expert, one product for each expert's rows, add up by token; in plain torch."""

    block: int = 16
    """Each expert's rows are padded to a multiple of it, as for a GPU's matrix units; 1: not at all."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"moe.block={self.block} must be at least 1.")


class Experts(NamedTuple):
    """This rank's share of each expert, numbered from ``first`` on."""

    gate_up: Tensor
    down: Tensor
    first: int
    act: Callable[[Tensor], Tensor]


class GroupedMoe:
    """See `minisgl.moe.MoeBackend` for shapes. A pair is a token and one of its choices, number token · top_k + choice;
    ``nobody``, one more than the last pair, is what blocks are padded with."""

    def __init__(self, block: int):
        self.block = block

    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Experts:
        from minisgl.layers.mlp import activation as find

        return Experts(gate_up, down, experts.start, find(activation))

    def forward(self, weights: Experts, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        pairs, counts = self.sort(ids.flatten() - weights.first, len(weights.down))
        with_nobody = torch.cat((x, torch.zeros_like(x[:1])))  # a token of zeros, which the padding reads
        rows = self.multiply(weights, with_nobody[pairs // ids.shape[1]], counts)
        return self.scatter(rows, pairs, scale, out)

    # lab: experts.sort
    def sort(self, expert: Tensor, experts: int) -> tuple[Tensor, list[int]]:
        """``expert`` [pairs]: whom each pair chose, counted from this rank's first; it has ``experts`` of them. Returns
        the pairs' numbers expert after expert, each padded to whole blocks, and how many each then has."""
        # 1. The sorted order is a permutation of the pairs: keep it, it is the way back.
        order = expert.argsort(stable=True)
        # 2. Other ranks' experts may come before ours and after: their pairs are not ours.
        nobody, begin = len(expert), int((expert < 0).sum())
        ours = expert[(expert >= 0) & (expert < experts)]
        pairs, counts = [], []
        for count in torch.bincount(ours, minlength=experts).tolist():
            # 3. A block belongs to one expert, so each expert's last one is padded. Nobody's choice has no block.
            padding = -count % self.block
            pairs += [order[begin : begin + count], order.new_full((padding,), nobody)]
            counts.append(count + padding)
            begin += count
        return torch.cat(pairs), counts

    # lab: end

    # lab: experts.multiply
    def multiply(self, weights: Experts, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [sum of counts, hidden], ``counts[e]`` for expert e → what the experts make of them, same shape."""
        linear = torch.nn.functional.linear
        done = []
        for expert, mine in enumerate(rows.split(list(counts))):
            # 1. Two products for an expert that somebody chose, and its weights are read once; none for another.
            if len(mine):
                inner = weights.act(linear(mine, weights.gate_up[expert]))
                done.append(linear(inner, weights.down[expert]))
        return torch.cat(done) if done else rows

    # lab: end

    # lab: experts.scatter
    def scatter(self, rows: Tensor, pairs: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write to out [tokens, hidden] each token's sum of its pairs' rows, weighted by scale [tokens, top_k]."""
        # 1. What padding made is nobody's.
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        # 2. A row's weight and its token follow from its pair: the rows are no longer in the tokens' order.
        rows = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        # 3. A token has several rows, or none here: begin with zeros and add, where writing would keep the last only.
        return out.zero_().index_add_(0, pairs // scale.shape[1], rows)

    # lab: end


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "moe", "grouped", Grouped


@hookimpl
def minisgl_moe(config: Any) -> MoeBackend | None:
    return GroupedMoe(config.block) if isinstance(config, Grouped) else None
