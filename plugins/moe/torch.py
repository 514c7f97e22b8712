"""``moe=torch``: experts in plain torch, one expert after another. The reference for all other MoE backends.

The number of tokens of each expert is read on the host, so on a GPU every MoE layer makes the host wait once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.hooks import hookimpl
from minisgl.plugins.moe import MoeBackend

if TYPE_CHECKING:
    from minisgl.plugins.kernels.ops.fp8 import Fp8Weight


@dataclass
class Torch:
    """A loop over experts in plain torch."""

    def build(self) -> MoeBackend:
        return TorchMoe()


class Experts(NamedTuple):
    """This rank's slice of the weights of the experts, whose global numbers begin at ``first``."""

    gate_up: Any  # [experts, 2·inner, hidden], or a list of the experts' matrices
    down: Any
    first: int
    act: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, Any], torch.Tensor] = torch.nn.functional.linear


class TorchMoe:
    """The backend; see `minisgl.plugins.moe.MoeBackend` for shapes."""

    find_activation: Callable[[str], Callable[[torch.Tensor], torch.Tensor]] | None = None
    """Returns a faster activation; None: that of `minisgl.layers.linear`."""

    def load(self, gate_up: torch.Tensor, down: torch.Tensor, experts: range, activation: str) -> Experts:
        """Keep the weights as they are: see `MoeBackend.load`."""
        from minisgl.layers.linear import activation as plain

        return Experts(gate_up, down, experts.start, (self.find_activation or plain)(activation))

    def load_fp8(self, gate_up: Fp8Weight, down: Fp8Weight, experts: range, activation: str) -> Experts:
        """Prepare experts in FP8, whose products quantise their inputs: see `fp8_linear_torch`.

        The arguments are those of `MoeBackend.load`, but a weight has values [experts, out, in] in e4m3 and the scales
        of whole blocks [experts, out / 128, in / 128] in float32: see `minisgl.plugins.kernels.ops.fp8`.
        """
        from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, fp8_linear_torch

        up_matrices, down_matrices = (list(map(Fp8Weight, *weight)) for weight in (gate_up, down))
        plain = self.load(gate_up.values, down.values, experts, activation)
        return Experts(up_matrices, down_matrices, plain.first, plain.act, fp8_linear_torch)

    def forward(
        self, weights: Experts, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Sort the (token, choice) pairs by expert, then compute one expert after another: see `MoeBackend.forward`."""
        gate_up, down, first, act, linear = weights
        top_k = ids.shape[1]
        order = ids.flatten().argsort(stable=True)  # the (token, choice) pairs, sorted by expert
        tokens = order // top_k
        scale = scale.flatten()[order].unsqueeze(1).to(x.dtype)
        counts = torch.bincount(ids.flatten(), minlength=first + len(down)).tolist()
        out.zero_()
        end = sum(counts[:first])
        for expert, count in enumerate(counts[first : first + len(down)]):
            begin, end = end, end + count
            if count:
                rows = tokens[begin:end]
                y = linear(act(linear(x[rows], gate_up[expert])), down[expert])
                out.index_add_(0, rows, y.mul_(scale[begin:end]))
        return out


@hookimpl
def minisgl_configs() -> Any:
    """Register the options of this plugin."""
    yield "moe", "torch", Torch
