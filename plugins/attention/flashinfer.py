"""`attention=flashinfer`: FlashInfer's paged attention kernels (arXiv:2501.01005), for any page size, graphs included.

Decode rows and prefill chunks of a step have a wrapper each. Planning runs once a step: it copies a schedule from
pinned memory to the device, so a pinned buffer is used again only when the copy that read it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.kernel.indices import page_indices

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool

INT_WORKSPACE = 8 << 20  # bytes of schedule that one plan may need; what FlashInfer itself sets aside
STAGES = 4  # pinned buffers: more than the steps that can be in flight, so waiting for one is rare


@dataclass
class FlashInfer:
    """FlashInfer's kernels: NVIDIA GPUs, bfloat16 or float16."""

    workspace: int = 256 << 20
    """Bytes for partial results of long sequences that several thread blocks share."""
    tensor_cores: bool | None = None
    """Decode on tensor cores; by default where at least 4 query heads share a KV head."""


class FlashInferBackend:
    """One decode wrapper for eager steps and one for each graph bucket; two prefill wrappers, of which each step's
    chunks take the faster."""

    def __init__(self, config: FlashInfer, device: torch.device):
        self.config, self.device = config, device
        self._eager: Any = None
        self._prefills: dict[bool, Any] = {}  # by what `packs` says
        self._graphs: dict[GraphKey, Any] = {}
        self._decode: Any = None  # the ones that the last plan chose
        self._prefill: Any = None
        self._num_decode = 0
        self._num_extend = 0

    def needs(self) -> AttnNeeds:
        refuse = ""
        if self.device.type != "cuda":
            refuse = "FlashInfer needs a CUDA device; attention=torch runs anywhere"
        return AttnNeeds(
            kv_dtypes=(torch.bfloat16, torch.float16),
            workspace=self.config.workspace + 2 * INT_WORKSPACE,
            graph=True,
            refuse=refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        import flashinfer

        first = layers[0]
        if any((la.window, la.soft_cap, la.scale) != (first.window, first.soft_cap, first.scale) for la in layers):
            raise ValueError("attention=flashinfer plans once for all layers; this model's layers differ")
        self._pool, self._layer = pool, first
        grouped = first.q_heads // first.kv_heads
        self._tensor_cores = grouped >= 4 if self.config.tensor_cores is None else self.config.tensor_cores
        self._floats = torch.empty(self.config.workspace, dtype=torch.uint8, device=self.device)
        self._stages = {kind: _Stages(self.device) for kind in ("decode", "prefill")}
        self._eager = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._floats, "NHD", use_tensor_cores=self._tensor_cores
        )
        self._prefills = {
            pack: flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._floats, "NHD", backend=kernel)
            for pack, kernel in ((False, "auto"), (True, "fa2"))
        }
        self._stages["decode"].adopt(self._eager)
        for wrapper in self._prefills.values():
            self._stages["prefill"].adopt(wrapper)
        self._indices: torch.Tensor | None = None
        self._pool_pages = pool.num_pages
        self._keys = tuple(keys)
        for wrapper in self._prefills.values():
            self._load(wrapper)

    def _load(self, wrapper: Any) -> None:
        """Have a prefill kernel found, or compiled, and loaded now, and not while somebody waits for an answer."""
        layer, dtype = self._layer, self._pool.dtype
        one = torch.ones(1, dtype=torch.int32)
        starts, page = torch.arange(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=self.device)
        self._plan_prefill(wrapper, starts, (starts, page, one))
        q = torch.zeros(1, layer.q_heads, layer.head_dim, dtype=dtype, device=self.device)
        wrapper.run(q, self._pool.layer(layer.index), out=torch.empty_like(q))

    def _graph_wrapper(self, key: GraphKey, columns: int) -> Any:
        """The bucket's wrapper, with static buffers; all buckets share one array of page numbers."""
        import flashinfer

        if self._indices is None:
            most = max(k.rows for k in self._keys) * columns
            self._indices = torch.zeros(most, dtype=torch.int32, device=self.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._floats,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(key.rows + 1, dtype=torch.int32, device=self.device),
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=torch.ones(key.rows, dtype=torch.int32, device=self.device),
        )
        self._stages["decode"].adopt(wrapper)
        return wrapper

    def plan(self, batch: AttnBatch) -> None:
        """Schedule the step's rows; copies only, no wait for the device."""
        rows = len(batch.seq_lens_cpu)
        self._num_decode = n = batch.num_decode
        self._num_extend = rows - n
        if n:
            wrapper = self._eager
            if batch.graph_key is not None:
                wrapper = self._graphs.get(batch.graph_key)
                if wrapper is None:
                    wrapper = self._graphs[batch.graph_key] = self._graph_wrapper(
                        batch.graph_key, batch.page_table.shape[1]
                    )
            self._decode = wrapper
            pages = self._pages(batch, 0, n)
            self._stages["decode"].plan(wrapper, lambda: wrapper.plan(*pages, *self._shape(), **self._options()))
        if self._num_extend:
            pages = self._pages(batch, n, rows)
            starts = batch.cu_seqlens_q_cpu[n:] - batch.cu_seqlens_q_cpu[n]
            self._prefill = self._prefills[packs(starts, batch.seq_lens_cpu[n:], self._layer.q_heads)]
            self._plan_prefill(self._prefill, torch.from_numpy(starts), pages)

    def _plan_prefill(self, wrapper: Any, starts: torch.Tensor, pages: Sequence[torch.Tensor]) -> None:
        """``starts`` on the host: where each row's queries begin; ``pages`` as `_pages` returns them."""
        self._stages["prefill"].plan(
            wrapper, lambda: wrapper.plan(starts, *pages, *self._shape(), causal=True, **self._options())
        )

    def _shape(self) -> tuple[int, int, int, int]:
        return self._layer.q_heads, self._layer.kv_heads, self._layer.head_dim, self._pool.page_size

    def _options(self) -> dict[str, Any]:
        layer, dtype = self._layer, self._pool.dtype
        return {
            "window_left": layer.window - 1 if layer.window > 0 else -1,
            "logits_soft_cap": layer.soft_cap or None,
            "sm_scale": layer.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def _pages(self, batch: AttnBatch, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows first … last: indptr on the host, page numbers on the device, tokens in the last page on the host."""
        size = self._pool.page_size
        lengths = torch.from_numpy(batch.seq_lens_cpu[first:last])
        counts = (lengths + (size - 1)) // size
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
        indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=self.device)
        ends = torch.empty(len(indptr) + len(counts), dtype=torch.int32, device=self.device)
        rows = (batch.req_pool_indices[first:last], batch.seq_lens[first:last])
        page_indices(batch.page_table, *rows, size, ends[: len(indptr)], indices, ends[len(indptr) :])
        return indptr, indices, lengths - (counts - 1) * size

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim]."""
        kv, n = self._pool.layer(layer.index), self._num_decode
        if n:
            self._decode.run(q[:n], kv, out=out[:n])
        if self._num_extend:
            self._prefill.run(q[n:], kv, out=out[n:])
        return out


def packs(starts: I32, seq_lens: I32, q_heads: int) -> bool:
    """Whether prompts' rows are for the kernel that fills a tile with all query heads of a KV head (``fa2``), and not
    for the one with tiles of 128 tokens of one head (``fa3``, on Hopper): where many rows have few tokens each, or one
    has a long prefix and only a few tiles to share it out to. Measured in docs/benchmarks/attention.md.

    starts [rows + 1]: where each row's queries begin; seq_lens [rows].
    """
    rows, tokens = len(seq_lens), int(starts[-1])
    if tokens <= 64 * rows:
        return rows * q_heads >= 256
    return rows * q_heads <= 64 and int(seq_lens.max()) >= 4096 and tokens <= 128


class _Stages:
    """A ring of pinned buffers for schedules, and the device buffer that they are copied to."""

    def __init__(self, device: torch.device):
        self._device_buffer = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(STAGES)]
        self._turn = 0

    def adopt(self, wrapper: Any) -> None:
        """Let a wrapper use these buffers instead of its own. One wrapper runs at a time, so they can share."""
        wrapper._int_workspace_buffer = self._device_buffer
        wrapper._pin_memory_int_workspace_buffer = self._pinned[0]

    def plan(self, wrapper: Any, plan: Callable[[], None]) -> None:
        """Run a plan on the next pinned buffer, after the copy that last read it."""
        self._turn = (self._turn + 1) % STAGES
        self._copied[self._turn].synchronize()
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        plan()
        self._copied[self._turn].record()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "flashinfer", FlashInfer


@hookimpl
def minisgl_attention(config: Any, device: torch.device) -> FlashInferBackend | None:
    return FlashInferBackend(config, device) if isinstance(config, FlashInfer) else None
