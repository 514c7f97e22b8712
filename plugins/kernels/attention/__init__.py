"""What several attention backends share: the fused KV store of a GPU, wrappers, and three optional abilities.

A backend may have three methods more than `minisgl.attention.AttentionBackend`. Layers outside of the core ask for
them, so a backend that wraps another one passes them on, as `BackendWrapper` does:

- ``fuses(layer, qkv)`` returns whether ``attend`` computes the rows of the planned step in the launches of attention
  alone, without launches for QK-norm, RoPE and the KV store. See `fuses`.
- ``attend_quantized(layer, qkv, norm, cos_sin, out_cache_loc)`` computes what ``attend`` does, and its last launch also
  quantises the result for an FP8 product. It returns `QuantizedRows` of q_heads·head_dim columns, rounded to qkv's
  dtype before they are quantised. It returns None, without an effect, if it can't do so for this step. See
  `attend_quantized`.
- ``planned_in_cpp()`` returns the batch of the planned step if ``attend`` computes all of its rows with the C++ kernels
  of a CPU, else None. See `planned_in_cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec, QKNorm

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.kvcache.pool import KVPool
    from minisgl.plugins.kernels.ops.fp8 import QuantizedRows

__all__ = ["BackendWrapper", "FusedStore", "attend_quantized", "fused_store", "fuses", "planned_in_cpp"]


class FusedStore(AttentionBackend):
    """The base of backends for a GPU: QK-norm, RoPE and the KV store are one Triton launch. On a CPU it is plain."""

    def norm_rope_store(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        """Compute `AttentionBackend.norm_rope_store`."""
        if not qkv.is_cuda:
            return super().norm_rope_store(layer, qkv, norm, cos_sin, out_cache_loc)
        return fused_store(self.pool, layer, qkv, norm, cos_sin, out_cache_loc)


def fused_store(
    pool: KVPool, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
) -> Tensor:
    """Compute `AttentionBackend.norm_rope_store` in one launch on a GPU."""
    from minisgl.plugins.kernels.ops.triton import rope

    heads = (layer.q_heads, layer.kv_heads)
    return rope.norm_rope_store(qkv, *heads, norm, cos_sin, pool, layer.index, out_cache_loc)


class BackendWrapper(AttentionBackend):
    """A backend that passes every call on to ``backend``. Subclasses change some of the calls."""

    def __init__(self, backend: AttentionBackend):
        self.backend = backend

    def needs(self) -> AttnNeeds:
        return self.backend.needs()

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        super().bind(pool, layers, keys)
        self.backend.bind(pool, layers, keys)

    def plan(self, batch: AttnBatch) -> None:
        self.backend.plan(batch)

    def attend(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        return self.backend.attend(layer, qkv, norm, cos_sin, out_cache_loc)

    def norm_rope_store(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> Tensor:
        return self.backend.norm_rope_store(layer, qkv, norm, cos_sin, out_cache_loc)

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        return self.backend.forward(layer, q, out)

    def fuses(self, layer: LayerSpec, qkv: Tensor) -> bool:
        return fuses(self.backend, layer, qkv)

    def attend_quantized(
        self, layer: LayerSpec, qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor
    ) -> QuantizedRows | None:
        return attend_quantized(self.backend, layer, qkv, norm, cos_sin, out_cache_loc)

    def planned_in_cpp(self) -> AttnBatch | None:
        return planned_in_cpp(self.backend)


def fuses(backend: AttentionBackend, layer: LayerSpec, qkv: Tensor) -> bool:
    """Return whether ``backend.attend`` computes the rows ``qkv`` of the planned step in the launches of attention.

    Only the rows, dtype and device of ``qkv`` [rows, any] count.
    """
    ability: Any = getattr(backend, "fuses", None)
    return ability is not None and bool(ability(layer, qkv))


def attend_quantized(
    backend: AttentionBackend,
    layer: LayerSpec,
    qkv: Tensor,
    norm: QKNorm | None,
    cos_sin: Tensor,
    out_cache_loc: Tensor,
) -> QuantizedRows | None:
    """Return what ``backend.attend`` computes, quantised by its last launch; None if ``backend`` can't do so."""
    ability: Any = getattr(backend, "attend_quantized", None)
    return None if ability is None else ability(layer, qkv, norm, cos_sin, out_cache_loc)


def planned_in_cpp(backend: AttentionBackend) -> AttnBatch | None:
    """Return the planned batch if ``backend.attend`` computes all of its rows with the C++ kernels of a CPU."""
    ability: Any = getattr(backend, "planned_in_cpp", None)
    return None if ability is None else ability()
