"""`attention=trtllm`: the decode kernels of TensorRT-LLM, as FlashInfer brings them; on Hopper they are called XQA.

They compute rows of one query and nothing else, so a server takes them as the decode half of `attention=hybrid`.
On Hopper each page size, head size and number of query heads to a KV head is compiled at its first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.attention.tables import RowTables
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool

WORKSPACE = 128 << 20  # bytes: what FlashInfer asks for; 8 MiB of it are semaphores, which start as zeros
MAJORS = (9, 10, 12)  # compute capabilities that FlashInfer has such kernels for


@dataclass
class Trtllm:
    """TensorRT-LLM's decode kernels through FlashInfer: Hopper or Blackwell, bfloat16 or float16, pages of 16 to 128
    tokens. Decode only: attention=hybrid attention.decode=trtllm attention.prefill=flashinfer."""


class TrtllmBackend:
    """See `minisgl.attention.AttentionBackend` for what is asked for and when."""

    def __init__(self, device: torch.device, capability: tuple[int, int] | None):
        self.device, self.capability = device, capability
        self._table: torch.Tensor | None = None
        self._kv_len: torch.Tensor | None = None
        self._longest = 0

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
        """Raises `ConfigError` for layers that the kernels can't compute."""
        for layer in layers:
            group = layer.q_heads // layer.kv_heads
            wrong = ""
            if layer.soft_cap:
                wrong = "have no soft cap, which this model's attention uses"
            elif layer.head_dim % 16 or layer.head_dim > 256:
                wrong = f"take head sizes that 16 divides, up to 256; this model's is {layer.head_dim}"
            elif group > 32:
                wrong = f"let at most 32 query heads share a KV head; in this model {group} do"
            if wrong:
                raise ConfigError(f"attention=trtllm: TensorRT-LLM's decode kernels {wrong}. Use attention=triton.")
        self._pool = pool
        self._tables = RowTables(pool.page_size, keys)
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=self.device)

    def plan(self, batch: AttnBatch) -> None:
        """Gather the rows' pages. Raises ValueError for prefill chunks."""
        rows = len(batch.seq_lens_cpu)
        if rows > batch.num_decode:
            raise ValueError("attention=trtllm computes decode rows only; attention=hybrid gives prefill to another")
        self._table = self._tables.gather(batch, 0, rows)
        self._kv_len, self._longest = batch.seq_lens, self._tables.longest(batch, 0, rows)

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim], contiguous: the kernel takes no strides."""
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        trtllm_batch_decode_with_kv_cache(
            query=q,
            kv_cache=self._pool.layer(layer.index),
            workspace_buffer=self._workspace,
            block_tables=self._table,
            seq_lens=self._kv_len,
            max_seq_len=self._longest,
            bmm1_scale=layer.scale,
            window_left=layer.window - 1 if layer.window >= 0 else -1,
            out=out,
            kv_layout="NHD",
        )
        return out


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "trtllm", Trtllm


@hookimpl
def minisgl_attention(config: Any, device: torch.device) -> TrtllmBackend | None:
    if not isinstance(config, Trtllm):
        return None
    if device.type != "cuda":
        return TrtllmBackend(device, None)
    import flashinfer.decode  # noqa: F401  a missing package is said now, not in the first step

    return TrtllmBackend(device, torch.cuda.get_device_capability(device))
