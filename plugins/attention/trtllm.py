"""`attention=trtllm`: TensorRT-LLM's decode attention kernels, which FlashInfer includes (named XQA on Hopper).

The kernels compute decode rows (one query token) only, so they serve as the decode backend of `attention=hybrid`. On
Hopper, FlashInfer compiles a kernel for each combination of page size, head size and query heads per KV head at first
use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.attention import AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.plugins.kernels.attention import FusedStore
from minisgl.plugins.kernels.attention.page_table_rows import PageTableRows

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool

WORKSPACE = 128 << 20  # bytes that FlashInfer requires; 8 MiB of them are semaphores, which must start as zeros
MAJORS = (9, 10, 12)  # major compute capabilities for which FlashInfer includes these kernels


@dataclass
class Trtllm:
    """TensorRT-LLM's decode kernels through FlashInfer.

    Hopper or Blackwell GPUs, bfloat16 or float16, pages of 16 to 128 tokens. The kernels compute decode rows only, so
    combine them: attention=hybrid attention.decode=trtllm attention.prefill=flashinfer.
    """

    def build(self, device: torch.device) -> TrtllmBackend:
        if device.type != "cuda":
            return TrtllmBackend(device, None)
        import flashinfer.decode  # noqa: F401  report a missing package at start, not in the first step

        return TrtllmBackend(device, torch.cuda.get_device_capability(device))


class TrtllmBackend(FusedStore):
    """Backend of attention=trtllm; `minisgl.attention.AttentionBackend` documents the methods.

    ``capability`` is the compute capability of the GPU, or None if the device is not a GPU.
    """

    def __init__(self, device: torch.device, capability: tuple[int, int] | None):
        self.device, self.capability = device, capability
        self._page_table: torch.Tensor | None = None
        self._seq_lens: torch.Tensor | None = None
        self._max_seq_len = 0

    def needs(self) -> AttnNeeds:
        refuse = ""
        if self.capability is None:
            refuse = "TensorRT-LLM's kernels need a CUDA device; attention=torch runs anywhere"
        elif self.capability[0] not in MAJORS:
            refuse = (
                f"TensorRT-LLM's kernels are for Hopper and Blackwell; this GPU has compute capability "
                f"{self.capability[0]}.{self.capability[1]}. Use attention=flashinfer."
            )
        return AttnNeeds(
            page_sizes=(16, 32, 64, 128),
            kv_dtypes=(torch.bfloat16, torch.float16),
            workspace=WORKSPACE,
            phases=frozenset({"decode"}),
            graph=True,
            refuse=refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Store the pool and allocate the workspace. Raises `ConfigError` for layers that the kernels can't compute."""
        for layer in layers:
            group = layer.q_heads // layer.kv_heads
            wrong = ""
            if layer.soft_cap:
                wrong = "do not support the soft cap of this model's attention"
            elif layer.head_dim % 16 or layer.head_dim > 256:
                wrong = f"support head sizes that are multiples of 16, up to 256, but this model has {layer.head_dim}"
            elif group > 32:
                wrong = f"support at most 32 query heads per KV head, but this model has {group}"
            if wrong:
                raise ConfigError(f"attention=trtllm: TensorRT-LLM's decode kernels {wrong}. Use attention=triton.")
        super().bind(pool, layers, keys)
        self._page_table_rows = PageTableRows(pool.page_size, keys)
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=self.device)

    def plan(self, batch: AttnBatch) -> None:
        """Gather the page-table rows. Raises ValueError if the step has prefill chunks."""
        rows = len(batch.seq_lens_cpu)
        if rows > batch.num_decode:
            raise ValueError(
                "attention=trtllm computes decode rows only: use it as attention.decode of attention=hybrid"
            )
        self._page_table = self._page_table_rows.gather(batch, 0, rows)
        self._seq_lens, self._max_seq_len = batch.seq_lens, self._page_table_rows.max_seq_len(batch, 0, rows)

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute the decode rows.

        ``q`` and ``out`` are [rows, q_heads, head_dim] and must be contiguous, because the kernel takes no strides.
        """
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        trtllm_batch_decode_with_kv_cache(
            query=q,
            kv_cache=self.pool.layer(layer.index),
            workspace_buffer=self._workspace,
            block_tables=self._page_table,
            seq_lens=self._seq_lens,
            max_seq_len=self._max_seq_len,
            bmm1_scale=layer.scale,
            window_left=layer.window - 1 if layer.window >= 0 else -1,
            out=out,
            kv_layout="NHD",
        )
        return out


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "trtllm", Trtllm
