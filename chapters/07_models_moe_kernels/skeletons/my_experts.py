"""Lab experts: Experts, each read once.

Grade it:  python -m minisgl.lab test experts     (`hint experts` for a hint)
Serve it:  python -m minisgl plugins=my_experts.py moe=mine
"""

# minisgl lab experts, skeleton 266cf7eeb5 (minisgl 0.2.0)

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
class Mine:
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


class MyMoe:
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

    def sort(self, expert: Tensor, experts: int) -> tuple[Tensor, list[int]]:
        """``expert`` [pairs]: whom each pair chose, counted from this rank's first; it has ``experts`` of them. Returns
        the pairs' numbers expert after expert, each padded to whole blocks, and how many each then has."""
        # TODO experts.sort
        # 1. The sorted order is a permutation of the pairs: keep it, it is the way back.
        # 2. Other ranks' experts may come before ours and after: their pairs are not ours.
        # 3. A block belongs to one expert, so each expert's last one is padded. Nobody's choice has no block.
        raise NotImplementedError

    def multiply(self, weights: Experts, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [sum of counts, hidden], ``counts[e]`` for expert e → what the experts make of them, same shape."""
        # TODO experts.multiply
        # 1. Two products for an expert that somebody chose, and its weights are read once; none for another.
        raise NotImplementedError

    def scatter(self, rows: Tensor, pairs: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write to out [tokens, hidden] each token's sum of its pairs' rows, weighted by scale [tokens, top_k]."""
        # TODO experts.scatter
        # 1. What padding made is nobody's.
        # 2. A row's weight and its token follow from its pair: the rows are no longer in the tokens' order.
        # 3. A token has several rows, or none here: begin with zeros and add, where writing would keep the last only.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "moe", "mine", Mine


@hookimpl
def minisgl_moe(config: Any) -> MoeBackend | None:
    return MyMoe(config.block) if isinstance(config, Mine) else None
