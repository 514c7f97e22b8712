"""Lab experts: Experts, each read once.

Grade it:  python -m minisgl.lab test experts     (`hint experts` for a hint)
Serve it:  python -m minisgl model=tutor-moe plugins=my_experts.py moe=mine
"""

# minisgl lab experts, skeleton 0c4c121966 (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.plugins.moe import MoeBackend


@dataclass
class Mine:
    """Sort by expert, multiply each expert's rows together, add up by token; in plain torch."""

    block: int = 16
    """Each expert's rows are padded to a multiple of this number, as a GPU's matrix units need; 1: no padding."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"moe.block={self.block} must be at least 1.")

    def build(self) -> MoeBackend:
        return MyMoe(self.block)


class Experts(NamedTuple):
    """This rank's slice of the weights of the experts, whose global numbers begin at ``first``."""

    gate_up: Tensor
    down: Tensor
    first: int
    act: Callable[[Tensor], Tensor]


class MyMoe:
    """The backend; see `minisgl.plugins.moe.MoeBackend` for shapes. The engine passes contiguous tensors.

    A pair is a token and one of its top_k choices of an expert; its number is token · top_k + choice. Blocks are padded
    with the number of pairs, which is no pair's number. One backend serves all layers. `multiply` may overwrite its
    ``rows``. Except for this, a method changes no tensor that it gets but ``out``. A later call changes no earlier
    result. Nothing of a step is kept. All tensors are on the device of the arguments.
    """

    def __init__(self, block: int):
        self.block = block

    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Experts:
        """Keep the weights as they are: see `MoeBackend.load`."""
        from minisgl.plugins.kernels.ops.activation import activation as find

        return Experts(gate_up, down, experts.start, find(activation))

    def forward(self, weights: Experts, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Sort, multiply and scatter: see `MoeBackend.forward`."""
        pairs, counts = self.sort(ids.flatten() - weights.first, len(weights.down))
        padded = torch.cat((x, torch.zeros_like(x[:1])))  # one more token, of zeros: padding entries read it
        rows = self.multiply(weights, padded[pairs // ids.shape[1]], counts)
        return self.scatter(rows, pairs, scale, out)

    def sort(self, expert: Tensor, experts: int) -> tuple[Tensor, list[int]]:
        """Sort the pairs by expert, and pad each expert's pairs to whole blocks.

        ``expert`` [pairs] is the expert that each pair chose, counted from this rank's first expert; this rank has
        ``experts`` experts. Returns the sorted pair numbers, in which padding entries are ``len(expert)``, and the
        number of entries of each of the ``experts`` experts, padding included. The pair numbers are a tensor of
        integers on the device of ``expert``. The order of an expert's entries is free.
        """
        # TODO experts.sort
        # 1. The sorted order is a permutation of the pairs. Keep it: it leads from a sorted row back to its token.
        # 2. Pairs of other ranks' experts are left out. They have numbers below 0 or from ``experts`` on.
        # 3. A block belongs to one expert, so each expert's last block is padded. An expert without pairs has no
        #    block, and the count 0.
        raise NotImplementedError

    def multiply(self, weights: Experts, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs; ``counts[e]`` rows are expert e's.

        The outputs have the shape [sum of counts, hidden] and the dtype of ``rows``.
        """
        # TODO experts.multiply
        # 1. Two products for each expert that has rows, so its weights are read once; none for an expert without.
        raise NotImplementedError

    def scatter(self, rows: Tensor, pairs: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write to out [tokens, hidden] the sum of each token's rows, weighted by scale [tokens, top_k]; return out.

        ``rows`` [entries, hidden] are the outputs of `multiply`, and ``pairs`` [entries] the pair numbers of `sort`.
        ``rows`` and ``out`` have the dtype of the model, and ``scale`` is float32. Before they are written, the sums
        may have either dtype.
        """
        # TODO experts.scatter
        # 1. Drop the rows that belong to padding, whatever numbers they contain.
        # 2. The rows are not in the order of tokens. A row's pair number gives its weight and its token.
        # 3. A token has several rows, or none on this rank. Start from zeros and add: a write would keep the last row
        #    only.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "moe", "mine", Mine
