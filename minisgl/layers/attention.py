"""The self-attention of a decoder layer: QKV projection, QK-norm, RoPE, KV store, attention, output projection.

The layer itself stores keys and values in ``ctx.pool``; the attention backend only reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.attention import (
    MAX_PROJECTED_ROWS,
    LayerSpec,
    ProjectedDecode,
    QuantizedAttention,
    projected_decode,
    quantized_attention,
)
from minisgl.layers.context import Context
from minisgl.layers.linear import LinearQKVMerged, LinearRowParallel
from minisgl.layers.norm import RMSNorm
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.launch import in_pieces
from minisgl.plugins.kernels.ops.rope import QKNorm, norm_rope_store


class AttentionLayer(nn.Module):
    """Grouped-query attention over the pages of the KV pool, with RoPE; heads are split over the ranks.

    ``window`` is the number of positions that a query sees, including its own (-1: all). ``qk_norm_eps`` is the eps of
    the RMSNorm of each query and key head before RoPE (None: no QK-norm). ``soft_cap`` limits attention scores to
    cap·tanh(score / cap) (0: no limit). The output is a partial sum: see `LinearRowParallel`.
    """

    def __init__(
        self,
        index: int,
        hidden_size: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        ctx: Context,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int = -1,
        soft_cap: float = 0.0,
        scale: float | None = None,
    ):
        super().__init__()
        self.ctx = ctx
        self.qkv_proj = LinearQKVMerged(hidden_size, q_heads, kv_heads, head_dim, ctx, bias=qkv_bias)
        self.o_proj = LinearRowParallel(q_heads * head_dim, hidden_size, ctx, bias=out_bias, reduce=False)
        self.spec = LayerSpec(
            index=index,
            q_heads=self.qkv_proj.q_heads,
            kv_heads=self.qkv_proj.kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            soft_cap=soft_cap,
        )
        self.norm: QKNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, ctx)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, ctx)
            self.norm = QKNorm(self.q_norm.weight, self.k_norm.weight, qk_norm_eps)

    def takes_quantized(self, rows: int) -> bool:
        """Return whether `forward` takes ``rows`` tokens as `QuantizedRows`."""
        return self.qkv_proj.takes_quantized(rows)

    def forward(
        self, x: Tensor | QuantizedRows, cos_sin: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Compute attention of x [tokens, hidden]; returns a partial sum [tokens, hidden].

        cos_sin is [tokens, head_dim] float32; out_cache_loc [tokens] is each token's KV location. With
        ``logits_indices`` [m], only these tokens' outputs are projected and returned: [m, hidden].
        """
        qkv = self.qkv_proj(x)
        own = type(self).attend is AttentionLayer.attend  # a subclass may compute something else in `attend`
        quantizing = self.quantizing_backend(qkv) if own and logits_indices is None else None
        if quantizing is not None:
            rows = QuantizedRows.empty(qkv, self.spec.q_heads * self.spec.head_dim)
            quantizing.forward_quantized(self.spec, self._queries(qkv, cos_sin, out_cache_loc), rows)
            return self.o_proj(rows)  # type: ignore[no-any-return]
        out = self.attend(qkv, cos_sin, out_cache_loc)
        projected: Tensor = self.o_proj(out if logits_indices is None else out.index_select(0, logits_indices))
        return projected

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute what is between the projections; returns [tokens, q_heads·head_dim].

        A subclass overrides this method to change queries, keys or values before attention, or its result.
        ``qkv`` [tokens, (q_heads + 2·kv_heads)·head_dim] is the result of the QKV projection. See `forward` for the
        other arguments.
        """
        spec = self.spec
        out = torch.empty((len(qkv), spec.q_heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
        projected_backend = self.projected_backend(qkv)
        if projected_backend is not None:  # a few decode rows on a GPU: the next two calls as one
            projected_backend.forward_projected(spec, qkv, self.norm, cos_sin, out_cache_loc, out)
        else:
            self.ctx.attention.forward(spec, self._queries(qkv, cos_sin, out_cache_loc), out)
        return out.flatten(1)

    def _queries(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute QK-norm and RoPE, and store keys and values; returns the queries [tokens, q_heads, head_dim]."""
        spec, pool = self.spec, self.ctx.pool
        if pool is None:
            raise RuntimeError("the engine must set Context.pool before the first forward")
        return norm_rope_store(qkv, spec.q_heads, spec.kv_heads, self.norm, cos_sin, pool, spec.index, out_cache_loc)

    def quantizing_backend(self, qkv: Tensor) -> QuantizedAttention | None:
        """Return the attention backend if it can quantise all of qkv's rows for the output projection, or None."""
        rows = len(qkv)
        if not self.o_proj.takes_quantized(rows) or in_pieces() or self.projected_backend(qkv) is not None:
            return None
        backend = quantized_attention(self.ctx.attention)
        return backend if backend is not None and backend.serves_quantized(self.spec, rows) else None

    def projected_backend(self, x: Tensor) -> ProjectedDecode | None:
        """Return the attention backend if it can compute x's rows from the result of the QKV projection, or None.

        x [rows, any] must be in half precision, on a GPU with programmatic dependent launch. All rows must decode.
        """
        if not x.is_cuda or len(x) > MAX_PROJECTED_ROWS or x.itemsize != 2 or in_pieces():
            return None
        from minisgl.plugins.kernels.ops.triton.early import starts_early

        backend = projected_decode(self.ctx.attention)
        served = backend is not None and starts_early(x) and backend.serves_projected(self.spec, len(x))
        return backend if served else None
