"""The interface of a mixture-of-experts (MoE) backend. Backends are plugins (`plugins/moe/`).

A backend computes the experts' outputs. The layer (`minisgl.layers.moe`) computes the routing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MoeBackend", "RoutedDecode"]


class MoeBackend(Protocol):
    """The computation of the experts to which tokens were routed."""

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


@runtime_checkable
class RoutedDecode(Protocol):
    """An optional ability of a backend: a few rows' norm, routing and experts in one call, with few launches."""

    def serves_routed(self, weights: Any, x: Tensor) -> bool:
        """Return whether `forward_routed` can compute x [rows, hidden] with these experts."""
        ...

    def forward_routed(
        self, weights: Any, x: Tensor, norm_weight: Tensor, eps: float, logits: Tensor, top_k: int, renormalize: bool
    ) -> Tensor:
        """Return x + the weighted sum of the outputs of each row's experts for the RMSNorm of x, [rows, hidden].

        x is the residual stream [rows, hidden]. The ``top_k`` experts and their weights follow from the router's
        ``logits`` [rows, experts], as `minisgl.layers.moe.MoELayer` describes.
        """
        ...
