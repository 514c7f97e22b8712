"""`attention=hybrid`: one backend for prefill chunks and another one for decode rows.

The module knows no backend: both are built by name. Any two backends that use the same pool layout can be combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec, QKNorm
from minisgl.hooks import hookimpl
from minisgl.plugins.attention import slice_rows
from minisgl.plugins.kernels.attention import attend_quantized, fuses

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool
    from minisgl.plugins.kernels.ops.fp8 import QuantizedRows


@dataclass
class Hybrid:
    """Two backends: ``prefill`` for prompts, ``decode`` for rows of one token."""

    prefill: str = "flashinfer"
    """Name of the backend for prefill chunks."""
    decode: str = "triton"
    """Name of the backend for decode rows."""

    def build(self, build_other: Callable[[str], AttentionBackend]) -> HybridBackend:
        for part in (self.prefill, self.decode):
            if part in ("hybrid", "auto"):
                raise ValueError(f"attention.prefill and attention.decode can't be {part}: name one such as triton")
        return HybridBackend(build_other(self.prefill), build_other(self.decode))


class HybridBackend(AttentionBackend):
    """Backend that passes the prefill chunks of every step to one backend and the decode rows to another one."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend):
        self.prefill, self.decode = prefill, decode
        self._num_decode = 0
        self._rows = 0

    def needs(self) -> AttnNeeds:
        """Return the combined needs of both backends. Raises ValueError if they need different pool layouts."""
        prefill, decode = self.prefill.needs(), self.decode.needs()
        if prefill.layout != decode.layout:
            raise ValueError(
                f"the prefill backend needs {prefill.layout} pages and the decode backend {decode.layout} pages: "
                "they can't share a pool"
            )
        refuse = prefill.refuse or decode.refuse
        for needs, phase, part in ((prefill, "extend", "prefill"), (decode, "decode", "decode")):
            if phase not in needs.phases and not refuse:
                refuse = f"the {part} backend does not compute {phase} rows"
        return AttnNeeds(
            page_sizes=_intersection(prefill.page_sizes, decode.page_sizes),
            layout=prefill.layout,
            kv_dtypes=_intersection(prefill.kv_dtypes, decode.kv_dtypes),
            workspace=prefill.workspace + decode.workspace,
            phases=frozenset({"decode", "extend"}),
            graph=decode.graph,
            shared_prefix=decode.shared_prefix,
            device_lengths=decode.device_lengths,
            fused_rows=decode.fused_rows,
            sinks=prefill.sinks and decode.sinks,
            refuse=refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Bind both backends. Only the decode backend gets the graph buckets, because graphs record decode steps."""
        super().bind(pool, layers, keys)
        self.prefill.bind(pool, layers, ())
        self.decode.bind(pool, layers, keys)

    def plan(self, batch: AttnBatch) -> None:
        """Plan the decode rows and the prefill chunks of the step, each on its backend."""
        self._num_decode, self._rows = n, rows = batch.num_decode, len(batch.seq_lens_cpu)
        if n == rows:
            self.decode.plan(batch)
        elif n == 0:
            self.prefill.plan(batch)
        else:
            self.decode.plan(slice_rows(batch, 0, n))
            self.prefill.plan(slice_rows(batch, n, rows))

    def attend(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step of one kind with the backend for it, and a mixed step in two parts."""
        only = self._only()
        if only is None:
            return super().attend(layer, qkv, norm, cos_sin, out_cache_loc)
        return only.attend(layer, qkv, norm, cos_sin, out_cache_loc)

    def norm_rope_store(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the queries, and store keys and values, as the decode backend does."""
        return self.decode.norm_rope_store(layer, qkv, norm, cos_sin, out_cache_loc)

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute each part of the step with its backend. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
        n = self._num_decode
        if n:
            self.decode.forward(layer, q[:n], out[:n])
        if n < self._rows:
            self.prefill.forward(layer, q[n:], out[n:])
        return out

    def _only(self) -> AttentionBackend | None:
        """Return the backend that computes all rows of the planned step, or None."""
        if self._num_decode == self._rows:
            return self.decode
        return self.prefill if self._num_decode == 0 else None

    def fuses(self, layer: LayerSpec, qkv: torch.Tensor) -> bool:
        """Return whether the step's only backend fuses it: see `minisgl.plugins.kernels.attention`."""
        only = self._only()
        return only is not None and fuses(only, layer, qkv)

    def attend_quantized(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> QuantizedRows | None:
        """Compute the step with its only backend: see `minisgl.plugins.kernels.attention`."""
        only = self._only()
        return None if only is None else attend_quantized(only, layer, qkv, norm, cos_sin, out_cache_loc)


def _intersection(a: Any, b: Any) -> Any:
    """Return the values that are in both tuples. None means that any value is supported."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(x for x in a if x in b)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "hybrid", Hybrid
