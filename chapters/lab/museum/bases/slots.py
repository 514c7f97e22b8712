"""Experts for a rank that has some of them: each pair of a token and its choice gets a slot, the number of its row.

The rows of one expert are adjacent, so its weights are read once. A token's result is gathered from the rows of its
slots. Slot 0 is a row of zeros. Buffers are as long as the largest step needed, and are used again in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Slots:
    """Experts whose outputs are gathered by slots, in plain torch."""

    def build(self) -> SlotMoe:
        return SlotMoe()


class Experts(NamedTuple):
    """This rank's experts, whose global numbers begin at ``first``."""

    gate_up: Tensor
    down: Tensor
    first: int
    act: Callable[[Tensor], Tensor]


class SlotMoe:
    """The backend; see `minisgl.plugins.moe.MoeBackend` for shapes. A pair's number is token * top_k + choice."""

    def __init__(self) -> None:
        self.slots = torch.zeros(0, dtype=torch.int64)  # of each pair of a step
        self.rows = torch.zeros(0, 0)  # of each slot

    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Experts:
        """Keep the weights as they are: see `MoeBackend.load`."""
        from minisgl.layers.linear import activation as find

        return Experts(gate_up, down, experts.start, find(activation))

    def forward(self, weights: Experts, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Assign slots, multiply and gather: see `MoeBackend.forward`."""
        self.reserve(ids.numel(), x)
        pairs, counts = self.assign(ids.flatten() - weights.first, len(weights.down))
        self.multiply(weights, x[pairs // ids.shape[1]], counts)
        return self.gather(scale, out)

    def reserve(self, pairs: int, x: Tensor) -> None:
        """Make the buffers long enough for a step with that many pairs."""
        if pairs >= len(self.rows) or self.rows.dtype != x.dtype or self.rows.shape[1] != x.shape[1]:
            self.rows = x.new_zeros(pairs + 1, x.shape[1])
            self.slots = torch.zeros(pairs, dtype=torch.int64, device=x.device)

    def assign(self, expert: Tensor, experts: int) -> tuple[Tensor, list[int]]:
        """Return the pairs that chose this rank's experts, sorted by expert, and how many chose each of them.

        ``expert`` [pairs] is counted from this rank's first expert. Slots are given in the order of the result.
        """
        here = torch.nonzero((expert >= 0) & (expert < experts)).flatten()
        pairs = here[expert[here].argsort(stable=True)]
        slots = self.slots[: len(expert)].zero_()
        slots[pairs] = torch.arange(1, len(pairs) + 1, device=expert.device)
        return pairs, torch.bincount(expert[pairs], minlength=experts).tolist()

    def multiply(self, weights: Experts, x: Tensor, counts: Sequence[int]) -> None:
        """Write the experts' outputs for x to the rows from slot 1 on; ``counts[e]`` of them are expert e's."""
        linear, begin = torch.nn.functional.linear, 0
        for expert, count in enumerate(counts):
            if count:
                inner = weights.act(linear(x[begin : begin + count], weights.gate_up[expert]))
                self.rows[1 + begin : 1 + begin + count] = linear(inner, weights.down[expert])
            begin += count

    def gather(self, scale: Tensor, out: Tensor) -> Tensor:
        """Write to out the sum of each token's rows, weighted by scale; return out."""
        slots = self.slots[: scale.numel()].view(scale.shape)
        return out.copy_((self.rows[slots] * scale.unsqueeze(2).to(out.dtype)).sum(1))


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "moe", "museum", Slots
