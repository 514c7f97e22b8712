"""`attention=hybrid`: one backend for prefill chunks and another for decode rows, each where it is good.

Knows no backend: both are made by name, so any two that agree on the pool's layout go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class Hybrid:
    """Two backends: ``prefill`` for prompts, ``decode`` for rows of one token."""

    prefill: str = "flashinfer"
    """Name of the backend for prefill chunks."""
    decode: str = "triton"
    """Name of the backend for decode rows."""


class HybridBackend:
    """Gives each of two backends its part of every step."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend):
        self.prefill, self.decode = prefill, decode
        self._num_decode = 0
        self._rows = 0

    def needs(self) -> AttnNeeds:
        """What both can serve. Raises ValueError where they can't share a pool."""
        prefill, decode = self.prefill.needs(), self.decode.needs()
        if prefill.layout != decode.layout:
            raise ValueError(
                f"prefill wants {prefill.layout} pages and decode {decode.layout}: they can't share a pool"
            )
        refuse = prefill.refuse or decode.refuse
        for needs, phase, part in ((prefill, "extend", "prefill"), (decode, "decode", "decode")):
            if phase not in needs.phases and not refuse:
                refuse = f"the {part} backend does not compute {phase} rows"
        return AttnNeeds(
            page_sizes=_both(prefill.page_sizes, decode.page_sizes),
            layout=prefill.layout,
            kv_dtypes=_both(prefill.kv_dtypes, decode.kv_dtypes),
            workspace=prefill.workspace + decode.workspace,
            phases=frozenset({"decode", "extend"}),
            graph=decode.graph,
            shared_prefix=decode.shared_prefix,
            refuse=refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        self.prefill.bind(pool, layers, ())
        self.decode.bind(pool, layers, keys)

    def plan(self, batch: AttnBatch) -> None:
        self._num_decode, self._rows = n, rows = batch.num_decode, len(batch.seq_lens_cpu)
        if n == rows:
            self.decode.plan(batch)
        elif n == 0:
            self.prefill.plan(batch)
        else:
            self.decode.plan(batch.slice_rows(0, n))
            self.prefill.plan(batch.slice_rows(n, rows))

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim]."""
        n = self._num_decode
        if n == self._rows:
            return self.decode.forward(layer, q, out)
        if n:
            self.decode.forward(layer, q[:n], out[:n])
        self.prefill.forward(layer, q[n:], out[n:])
        return out


def _both(a: Any, b: Any) -> Any:
    """What is in both; None stands for anything."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(x for x in a if x in b)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "hybrid", Hybrid


@hookimpl
def minisgl_attention(config: Any, build: Callable[[str], AttentionBackend]) -> HybridBackend | None:
    if not isinstance(config, Hybrid):
        return None
    for part in (config.prefill, config.decode):
        if part in ("hybrid", "auto"):
            raise ValueError(f"prefill and decode must be backends themselves, not {part}")
    return HybridBackend(build(config.prefill), build(config.decode))
