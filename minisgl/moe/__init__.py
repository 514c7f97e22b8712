"""What a mixture-of-experts backend is asked for. Backends are plugins; routing is the layer's business."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MoeBackend"]


class MoeBackend(Protocol):
    """Multiplies tokens with the experts they were routed to."""

    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Any:
        """gate_up [experts, 2·inner, hidden], down [experts, hidden, inner]: this rank's share of each expert.
        ``experts`` are their global numbers; ``activation`` is "silu" or "gelu". Returns what `forward` takes."""

    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """x, out [tokens, hidden]; ids [tokens, top_k] int32, global; scale [tokens, top_k] float32. Writes the sum
        over this rank's experts, a partial sum where ranks share the work: the layer all-reduces."""
