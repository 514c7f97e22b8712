"""`attention=cpp`: decode attention on a CPU in C++, which reads each key and value once, in place.

The kernel is `plugins/kernels/ops/cpp/attention.cpp`, compiled at the first start on a machine. It computes decode
rows, and rows of few query tokens such as the verification rows of speculative decoding. Longer prefill chunks are
computed by another backend, because a matrix product is faster for many queries. QK-norm, RoPE and KV store are one
call in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl.attention import AttentionBackend, AttnBatch, AttnNeeds, GraphKey, LayerSpec, QKNorm
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.plugins.attention import slice_rows
from minisgl.plugins.kernels.ops.cpp import attention as kernel
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class Cpp:
    """Decode attention in C++. CPU only, float32 or bfloat16; needs ``minisgl[cpp]`` and a C++ compiler."""

    prefill: str = "torch"
    """Name of the backend for prefill chunks."""
    max_query_tokens: int = 512
    """Rows of at most this number of query tokens are computed in C++, longer ones by the prefill backend."""

    def __post_init__(self) -> None:
        if self.max_query_tokens < 1:
            raise ValueError(f"attention.max_query_tokens={self.max_query_tokens} must be at least 1")

    def build(self, device: torch.device, build_other: Callable[[str], AttentionBackend]) -> CppAttention:
        return CppAttention(build_other(self.prefill), device, self.max_query_tokens)


class CppAttention(AttentionBackend):
    """Backend of attention=cpp; `minisgl.attention.AttentionBackend` documents the methods.

    ``prefill`` is the backend for rows of more than ``max_query_tokens`` query tokens.
    """

    def __init__(self, prefill: AttentionBackend, device: torch.device, max_query_tokens: int = 512):
        self.prefill, self.device, self.max_query_tokens = prefill, device, max_query_tokens
        self.few: AttnBatch | None = None  # the rows that the kernel computes
        self.tokens = 0  # number of their query tokens
        self.has_prefill = False

    def needs(self) -> AttnNeeds:
        """Return the needs. The first call on a machine compiles the kernel, which takes seconds."""
        prefill = self.prefill.needs()
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
        if prefill.kv_dtypes is not None:
            dtypes = tuple(dtype for dtype in dtypes if dtype in prefill.kv_dtypes)
        return AttnNeeds(
            prefill.page_sizes,
            kv_dtypes=dtypes,
            workspace=prefill.workspace,
            graph=True,
            sinks=prefill.sinks,
            groups=prefill.groups,
            refuse=self._refuse(prefill) or prefill.refuse,
        )

    def _refuse(self, prefill: AttnNeeds) -> str:
        """Return why the kernel can't run, or an empty string if it can."""
        if self.device.type != "cpu":
            return "it runs on CPUs only; use attention=auto."
        if prefill.layout != "NHD":
            return f"its prefill backend needs {prefill.layout} pages, but attention=cpp needs NHD pages."
        try:
            kernel.compiled()
        except ConfigError as error:
            return f"{error} attention=sparse and attention=torch need no compiler."
        return ""

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Store the pool. Raises `ConfigError` for a head size that the kernel does not support."""
        for dim in {layer.head_dim for layer in layers}:
            if dim % kernel.HEAD_DIM_MULTIPLE:
                raise ConfigError(
                    f"the model's head_dim is {dim}; attention=cpp needs a multiple of {kernel.HEAD_DIM_MULTIPLE}. Use "
                    "attention=sparse (float32) or attention=torch."
                )
        super().bind(pool, layers, keys)
        self.prefill.bind(pool, layers, ())

    def plan(self, batch: AttnBatch) -> None:
        """Divide the rows: those before the first long one are computed in C++, the others by the prefill backend."""
        rows = len(batch.seq_lens_cpu)
        long = np.diff(batch.cu_seqlens_q_cpu) > self.max_query_tokens
        few = int(np.argmax(long)) if long.any() else rows
        self.few = slice_rows(batch, 0, few) if few else None
        self.tokens, self.has_prefill = int(batch.cu_seqlens_q_cpu[few]), few < rows
        if self.has_prefill:
            self.prefill.plan(slice_rows(batch, few, rows))

    def norm_rope_store(
        self,
        layer: LayerSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Compute `AttentionBackend.norm_rope_store` in C++."""
        heads = (layer.q_heads, layer.kv_heads)
        return kernel.norm_rope_store(qkv, *heads, norm, cos_sin, self.pool, layer.index, out_cache_loc)

    def planned_in_cpp(self) -> AttnBatch | None:
        """Return the rows of the step if the kernel computes all: see `minisgl.plugins.kernels.attention`."""
        return None if self.has_prefill or type(self) is not CppAttention else self.few

    @one_launch
    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute the rows in C++ and the prefill chunks. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
        if self.few is not None:
            kernel.paged_attention(q, out, *self.pool.layer(layer.index), self.few, layer)
        if self.has_prefill:
            self.prefill.forward(layer, q[self.tokens :], out[self.tokens :])
        return out


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "cpp", Cpp
