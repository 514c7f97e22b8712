"""Piecewise graphs for steps with prompts: the launches between two calls of attention are recorded, attention is not.

The attention of a prompt is planned anew for each step: even the choice of kernels depends on the lengths of the rows.
So it cannot be replayed. Everything else in a layer depends only on the number of tokens. vLLM and SGLang call this
piecewise CUDA graphs. This module knows attention backends, and no steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.attention import AttentionBackend, LayerSpec, QKNorm
from minisgl.plugins.kernels.attention import BackendWrapper
from minisgl.plugins.kernels.ops.launch import between_pieces

if TYPE_CHECKING:
    from minisgl.plugins.kernels.ops.fp8 import QuantizedRows

__all__ = ["PiecewiseAttention"]

MAX_RECORDED_ZEROS = 1024
"""The most tokens of a bucket whose recording sets all rows of attention's output to zero.

Attention does not write padding rows, and uninitialised memory may hold NaN. In larger buckets only the padding rows
are set to zero, by a launch that is not recorded and costs the host a few microseconds. With few tokens the host is
often slower than the device, so there the zeros are recorded.
"""


class PiecewiseAttention(BackendWrapper):
    """Attention backend that wraps another one, for a model whose steps with prompts are recorded in pieces.

    Inside `in_bucket`, a call of ``forward`` ends one recorded piece and begins the next. Between the two pieces, the
    wrapped backend computes attention for the step's tokens, not for padding. Outside `in_bucket`, ``forward`` calls
    the wrapped backend directly.
    """

    def __init__(self, backend: AttentionBackend):
        super().__init__(backend)
        # The step's number of tokens while its bucket is replayed; 0 during the recording; None outside `in_bucket`.
        self._num_tokens: int | None = None

    @contextmanager
    def in_bucket(self, tokens: int) -> Iterator[None]:
        """Mark the body as the replay of a bucket with ``tokens`` tokens of a step followed by padding.

        With ``tokens`` 0, mark the body as the recording of a bucket, in which no step is computed.
        """
        self._num_tokens = tokens
        try:
            yield
        finally:
            self._num_tokens = None

    def attend(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        """Compute attention as the wrapped backend does. Inside `in_bucket`, the KV store is part of a piece."""
        if self._num_tokens is None:
            return super().attend(layer, qkv, norm, cos_sin, out_cache_loc)
        return AttentionBackend.attend(self, layer, qkv, norm, cos_sin, out_cache_loc)

    def fuses(self, layer: LayerSpec, qkv: Tensor) -> bool:
        """Return whether the wrapped backend fuses the step. Inside `in_bucket`, the KV store is a separate launch."""
        return self._num_tokens is None and super().fuses(layer, qkv)

    def attend_quantized(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> QuantizedRows | None:
        """Compute what the wrapped backend does. Inside `in_bucket`, return None: attention is in no piece."""
        if self._num_tokens is not None:
            return None
        return super().attend_quantized(layer, qkv, norm, cos_sin, out_cache_loc)

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        """Compute attention as `AttentionBackend.forward` does. Inside `in_bucket`, the rows of padding become zero."""
        if self._num_tokens is None:
            return self.backend.forward(layer, q, out)
        if len(out) <= MAX_RECORDED_ZEROS:
            out.zero_()
        self._attend(layer, q, out)
        return out

    @between_pieces
    def _attend(self, layer: LayerSpec, q: Tensor, out: Tensor) -> None:
        """Compute attention for the step's tokens, and set the padding rows of a large bucket to zero.

        During the recording every row is padding, and nothing is planned.
        """
        n = self._num_tokens or 0
        if len(out) > MAX_RECORDED_ZEROS and n < len(out):
            out[n:].zero_()
        if n:
            self.backend.forward(layer, q[:n], out[:n])
