"""`attention=auto`: selection of the fastest backend for the device, the dtype and the head size.

The choice rests on measurements on an H200 (docs/benchmarks/attention.md). FlashInfer is fastest for prefill if host
time is counted too, and minisgl's Triton kernels are fastest for decode. So a GPU gets `attention=hybrid` of these two,
or `attention=triton` alone if FlashInfer is not installed or does not support the dtype or head size. A CPU gets
`attention=cpp` if a C++ kernel can be compiled here (docs/benchmarks/cpu-offline.md), else `attention=sparse` for
float32 and `attention=torch` for other dtypes. A GPU without Triton gets `attention=torch`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from minisgl.attention import AttentionBackend, AttnNeeds, GraphKey, LayerSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.kernels.attention import BackendWrapper
from minisgl.plugins.kernels.ops.cpp.attention import HEAD_DIM_MULTIPLE

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class Auto:
    """The fastest installed backend that supports this device, dtype and head size."""

    def build(self, device: torch.device, build_other: Callable[[str], AttentionBackend]) -> AutoBackend:
        names = ["cpp", "sparse", "torch"] if device.type == "cpu" else ["torch"]
        if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            names = ["triton"]
            if importlib.util.find_spec("flashinfer") is not None:
                names.insert(0, "hybrid")
        return AutoBackend([(name, build_other(name)) for name in names])


class AutoBackend(BackendWrapper):
    """Wrapper around candidate backends, best first. `bind` selects the first candidate that fits the pool and layers.

    ``backend`` is the selected candidate and ``chosen`` its name. The last candidate is selected if no other one fits.
    """

    def __init__(self, candidates: Sequence[tuple[str, AttentionBackend]]):
        self._candidates = candidates
        self.chosen, backend = candidates[-1]
        super().__init__(backend)

    def needs(self) -> AttnNeeds:
        """Return the needs of the last candidate, with the largest workspace and ``fused_rows`` of all candidates.

        The last candidate is the fallback, so its requirements decide what the engine accepts.
        """
        needs = [backend.needs() for _, backend in self._candidates]
        last = needs[-1]
        return replace(last, workspace=max(n.workspace for n in needs), fused_rows=max(n.fused_rows for n in needs))

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Select the first candidate that fits, and bind it."""
        for name, backend in self._candidates:
            if _fits(name, backend.needs(), pool, layers):
                self.chosen, self.backend = name, backend
                break
        super().bind(pool, layers, keys)


def _fits(name: str, needs: AttnNeeds, pool: KVPool, layers: Sequence[LayerSpec]) -> bool:
    """Return whether the backend ``name`` can serve this pool and these layers."""
    if needs.refuse or needs.layout != pool.layout:
        return False
    if not needs.sinks and any(layer.sinks is not None for layer in layers):
        return False
    if needs.page_sizes is not None and pool.page_size not in needs.page_sizes:
        return False
    if needs.kv_dtypes is not None and pool.dtype not in needs.kv_dtypes:
        return False
    if name == "cpp":
        return all(layer.head_dim % HEAD_DIM_MULTIPLE == 0 for layer in layers)
    first = layers[0]
    uniform = all((la.window, la.soft_cap, la.scale) == (first.window, first.soft_cap, first.scale) for la in layers)
    # FlashInfer, hybrid's prefill backend, supports these head sizes and plans once for all layers.
    return name != "hybrid" or (first.head_dim in (64, 128, 256) and uniform)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "auto", Auto
