"""The collectives between the tensor-parallel ranks of one model, as one rank computes them.

Communicators of several ranks are plugins: `torch.py`, `nccl.py` and `ring.py` in `plugins/communicator/`. This module
knows none of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch  # a light process loads it only at its first use

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Communicator"]


class Communicator:
    """Collectives among the tensor-parallel ranks of one engine. This class is that of one rank: it sends nothing."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks. The result may be another tensor than x; x may be overwritten."""
        return x

    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """All-reduce x, add ``residual`` to the sum, and apply RMSNorm with ``weight``.

        x and residual are [tokens, dim], weight is [dim]. Returns ``(normalised, new residual)``, each [tokens, dim]; x
        may be overwritten.
        """
        residual = self.all_reduce(x).add_(residual)
        return torch.nn.functional.rms_norm(residual, weight.shape, weight, eps), residual

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate x of all ranks along ``dim`` in rank order; every rank gets the result."""
        return x

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Return rank ``src``'s x on every rank; the other ranks' x may be overwritten."""
        return x

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, in rank order. Called at start-up only."""
        return [data]

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context manager that the engine enters around each CUDA graph capture."""
        return nullcontext()

    def close(self, abort: bool = False) -> None:
        """Close the connections. With ``abort``, a peer has died: do not wait for the other ranks."""
