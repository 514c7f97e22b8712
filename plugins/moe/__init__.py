"""The MoE backends (group `moe`), one file each, and their interface.

A backend computes the experts' outputs. The layer (`plugins/models/experts/`) computes the routing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MoeBackend"]


class MoeBackend(Protocol):
    """The computation of the experts to which tokens were routed.

    A backend with the method ``load_clamped`` also computes the experts of gpt-oss: see `TritonMoe`. One with
    ``load_fp8`` computes experts in FP8 (`minisgl.plugins.moe.torch.TorchMoe`), and one with ``load_mxfp4`` those of
    gpt-oss in MXFP4 (`TritonMoe`).
    """

    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Any:
        """Prepare the experts' weights; returns an object that the layer passes to `forward` as ``weights``.

        gate_up [experts, 2·inner, hidden] and down [experts, hidden, inner] hold this rank's slice of each expert.
        ``experts`` are the experts' global numbers. ``activation`` is a ``hidden_act`` name, such as "silu" or "gelu".
        """

    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Write to ``out`` each token's weighted sum of its experts' outputs, and return ``out``.

        x and out are [tokens, hidden]; ids [tokens, top_k] int32 are global expert numbers; scale [tokens, top_k]
        float32 are the router's weights. All four are contiguous. The sum covers only the experts that were passed to
        `load`, and this rank's slice of them. With several ranks it is a partial sum, which is all-reduced outside the
        backend.
        """
