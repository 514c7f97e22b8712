"""`attention=auto`: the backend that was measured to be the fastest here, by device, dtype and head size.

On an H200 (docs/benchmarks/attention.md): FlashInfer is fastest at prefill when the host's time counts too, our Triton
kernels at decode, so a GPU gets the two together; Triton alone where FlashInfer is not installed or does not know the
dtype or head size. A CPU gets sparse, which reads KV once, in float32, and torch for other dtypes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class Auto:
    """The fastest of the backends that are installed and serve this device, dtype and head size."""


class AutoBackend:
    """Stands for its candidates until it is bound to a pool, and from then on for the first that fits."""

    def __init__(self, candidates: Sequence[tuple[str, AttentionBackend]]):
        self._candidates = candidates
        self.chosen = candidates[-1][0]
        self._backend = candidates[-1][1]

    def needs(self) -> AttnNeeds:
        """The last candidate takes what the others can't; room is set aside for any of them."""
        needs = [backend.needs() for _, backend in self._candidates]
        last = needs[-1]
        return replace(last, workspace=max(n.workspace for n in needs))

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        for name, backend in self._candidates:
            if _fits(name, backend.needs(), pool, layers):
                self.chosen, self._backend = name, backend
                break
        self._backend.bind(pool, layers, keys)

    def plan(self, batch: AttnBatch) -> None:
        self._backend.plan(batch)

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim]."""
        return self._backend.forward(layer, q, out)


def _fits(name: str, needs: AttnNeeds, pool: KVPool, layers: Sequence[LayerSpec]) -> bool:
    if needs.refuse or needs.layout != pool.layout:
        return False
    if needs.page_sizes is not None and pool.page_size not in needs.page_sizes:
        return False
    if needs.kv_dtypes is not None and pool.dtype not in needs.kv_dtypes:
        return False
    first = layers[0]
    alike = all((la.window, la.soft_cap, la.scale) == (first.window, first.soft_cap, first.scale) for la in layers)
    return name != "hybrid" or (first.head_dim in (64, 128, 256) and alike)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "auto", Auto


@hookimpl
def minisgl_attention(
    config: Any, device: torch.device, build: Callable[[str], AttentionBackend]
) -> AutoBackend | None:
    if not isinstance(config, Auto):
        return None
    names = ["sparse", "torch"]
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        names = ["triton"]
        if importlib.util.find_spec("flashinfer") is not None:
            names.insert(0, "hybrid")
    return AutoBackend([(name, build(name)) for name in names])
