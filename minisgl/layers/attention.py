"""The self-attention of a decoder layer: QKV projection, what the attention backend computes, output projection."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.attention import LayerSpec, QKNorm
from minisgl.layers.context import Context
from minisgl.layers.linear import LinearQKVMerged, LinearRowParallel
from minisgl.layers.norm import RMSNorm


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

    def forward(
        self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Compute attention of x [tokens, hidden]; returns a partial sum [tokens, hidden].

        cos_sin is [tokens, head_dim] float32; out_cache_loc [tokens] is each token's KV location. With
        ``logits_indices`` [m], only these tokens' outputs are projected and returned: [m, hidden].
        """
        out = self.attend(self.qkv_proj(x), cos_sin, out_cache_loc)
        projected: Tensor = self.o_proj(out if logits_indices is None else out.index_select(0, logits_indices))
        return projected

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute what is between the projections; returns [tokens, q_heads·head_dim].

        A subclass overrides this method to change queries, keys or values before attention, or its result.
        ``qkv`` [tokens, (q_heads + 2·kv_heads)·head_dim] is the result of the QKV projection. See `forward` for the
        other arguments.
        """
        return self.ctx.attention.attend(self.spec, qkv, self.norm, cos_sin, out_cache_loc)
