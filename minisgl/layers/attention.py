"""The self-attention of a decoder layer, and its parts beside the projections: RMSNorm, and the table of RoPE.

The table of cosines and sines of all positions is computed once, in float32. `minisgl.attention.rotate` applies it to
queries and keys. Pages of the prefix cache are shared by sequences of any length, so an angle may depend on the
position only, not on the length of the sequence. A type that breaks this rule beyond a length allows no longer sequence
(`RopeConfig.max_len`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.attention import LayerSpec, QKNorm
from minisgl.config import ConfigError
from minisgl.layers.context import Context
from minisgl.layers.linear import LinearQKVMerged, LinearRowParallel
from minisgl.layers.weight_shards import WeightShard


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, dim: int, eps: float, ctx: Context):
        super().__init__()
        self.weight = ctx.parameter(dim)
        self.eps = eps

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the weight, which every rank holds in full."""
        yield WeightShard.whole(f"{prefix}weight", self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]; returns a tensor of the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RMSNormFused(RMSNorm):
    """RMSNorm of the sum of x and the residual stream.

    With ``partial`` and several ranks, x is a partial sum and is first all-reduced over the ranks. All-reduce, addition
    and norm are then one call of the communicator, which can fuse them into one launch.
    """

    def __init__(self, dim: int, eps: float, ctx: Context, *, partial: bool = True):
        super().__init__(dim, eps, ctx)
        self.comm = ctx.comm if partial and ctx.comm.size > 1 else None

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)`` for x and residual [tokens, dim].

        With ``partial``, x here means its sum over the ranks. Without ``residual``, x itself starts the residual stream
        and must not be a partial sum; the result is ``(norm(x), x)``. x may be overwritten.
        """
        if residual is not None:
            if self.comm is not None:
                return self.comm.all_reduce_norm(x, residual, self.weight, self.eps)
            x = x.add_(residual)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps), x


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The RoPE parameters of config.json, under Hugging Face's names.

    A type that scales the frequencies has a subclass, from `ROPE_TYPES`. ``rope_type`` may also be one that only a
    model's plugin knows: `frequencies` refuses it.
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0  # the rotated part of a head; `frequencies` refuses all but 1

    def max_len(self, max_position_embeddings: int) -> int:
        """Return the longest sequence that the model supports, in tokens."""
        return max_position_embeddings

    @property
    def why_no_longer(self) -> str:
        """Why no sequence may be longer than `max_len`, as a sentence; "" if that is the model's context."""
        return ""

    def scale(self, inv_freq: Tensor) -> tuple[Tensor, float]:
        """Return the frequencies made of the plain ones ``inv_freq``, and the factor for cosines and sines."""
        if self.rope_type != "default":
            known = ", ".join(("default", *ROPE_TYPES))
            raise ConfigError(f"rope_type {self.rope_type!r} is not supported. Supported types: {known}.")
        return inv_freq, 1.0


ROPE_TYPES: dict[str, Callable[[dict[str, Any], int], RopeConfig]] = {}
"""RoPE type → what reads its parameters, given those of config.json and ``max_position_embeddings``.

The file `plugins/models/rope_scaling.py` adds the types of transformers.
"""


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each of the head_dim/2 pairs, and a factor for cosines and sines.

    The angles are float32 [head_dim/2], in radians. Su et al., RoFormer, 2021. Raises ConfigError for a type that is
    not in `ROPE_TYPES`, if a head is rotated in part, or for an odd ``head_dim``.
    """
    if rope.partial_rotary_factor != 1.0:
        raise ConfigError(
            f"partial_rotary_factor={rope.partial_rotary_factor} is not supported: every dimension of a head must be "
            "rotated, unless a plugin brings its own rotation."
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} is odd, but RoPE rotates pairs of dimensions.")
    if rope.rope_type == "per_layer_type":
        raise ConfigError(
            "rope_parameters differ by layer type, which is not supported: a plugin must build a table for each type "
            "from ModelConfig.rope_by_layer_type."
        )
    inv_freq = 1.0 / (rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    return rope.scale(inv_freq)


class RoPE(nn.Module):
    """The RoPE table of a model, [positions, head_dim] float32: cosines, then sines. All layers share one table."""

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device):
        super().__init__()
        inv_freq, scale = frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inv_freq.to(device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scale)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines [n, head_dim], float32, of positions [n]."""
        return self.cos_sin.index_select(0, positions)


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
