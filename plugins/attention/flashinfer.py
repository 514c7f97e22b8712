"""`attention=flashinfer`: FlashInfer's paged attention kernels (arXiv:2501.01005), for any page size and with graphs.

Decode rows and prefill chunks of a step use separate FlashInfer wrappers. Planning runs once per step and copies a
schedule asynchronously from pinned host memory to the device. So a pinned buffer is written again only after the copy
that reads it has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.kernels.attention import FusedStore
from minisgl.plugins.kernels.ops.indices import page_indices

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool

INT_WORKSPACE = 8 << 20  # bytes for the schedule of one plan; FlashInfer's own default size
PINNED_BUFFERS = 4  # pinned buffers in a ring: more than steps in flight, so waiting for a free buffer is rare


@dataclass
class FlashInfer:
    """FlashInfer's kernels: NVIDIA GPUs, bfloat16 or float16."""

    workspace: int = 256 << 20
    """Bytes of device memory for partial results of sequences whose KV is split over several thread blocks."""
    tensor_cores: bool | None = None
    """Whether decode uses tensor cores. By default it does if at least 4 query heads share a KV head."""

    def build(self, device: torch.device) -> FlashInferBackend:
        return FlashInferBackend(self, device)


class FlashInferBackend(FusedStore):
    """FlashInfer backend; `minisgl.attention.AttentionBackend` documents the methods.

    It has one decode wrapper for eager steps, one decode wrapper for each graph bucket, and two prefill wrappers with
    different kernels. `plan` selects the faster prefill wrapper for the chunks of a step.
    """

    def __init__(self, config: FlashInfer, device: torch.device):
        self.config, self.device = config, device
        self._eager: Any = None
        self._prefills: dict[bool, Any] = {}  # by the result of `packs_query_heads`
        self._graphs: dict[GraphKey, Any] = {}
        self._decode: Any = None  # wrappers selected by the last plan
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
        """Build the wrappers and load the prefill kernels. Raises ValueError if the layers differ in their options."""
        import flashinfer

        first = layers[0]
        if any((la.window, la.soft_cap, la.scale) != (first.window, first.soft_cap, first.scale) for la in layers):
            raise ValueError(
                "attention=flashinfer plans once for all layers, but this model's layers differ in window, soft cap or "
                "scale: use attention=triton"
            )
        super().bind(pool, layers, keys)
        self._layer = first
        group_size = first.q_heads // first.kv_heads
        self._tensor_cores = group_size >= 4 if self.config.tensor_cores is None else self.config.tensor_cores
        self._floats = torch.empty(self.config.workspace, dtype=torch.uint8, device=self.device)
        self._staging = {kind: _ScheduleStaging(self.device) for kind in ("decode", "prefill")}
        self._eager = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._floats, "NHD", use_tensor_cores=self._tensor_cores
        )
        self._prefills = {
            pack: flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._floats, "NHD", backend=kernel)
            for pack, kernel in ((False, "auto"), (True, "fa2"))
        }
        self._staging["decode"].adopt(self._eager)
        for wrapper in self._prefills.values():
            self._staging["prefill"].adopt(wrapper)
        self._indices: torch.Tensor | None = None
        self._pool_pages = pool.num_pages
        self._keys = tuple(keys)
        for wrapper in self._prefills.values():
            self._load(wrapper)

    def _load(self, wrapper: Any) -> None:
        """Run a prefill wrapper on one token, so that its kernel is compiled and loaded before the first request."""
        layer, dtype = self._layer, self.pool.dtype
        one = torch.ones(1, dtype=torch.int32)
        starts, page = torch.arange(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=self.device)
        self._plan_prefill(wrapper, starts, (starts, page, one))
        q = torch.zeros(1, layer.q_heads, layer.head_dim, dtype=dtype, device=self.device)
        wrapper.run(q, self.pool.layer(layer.index), out=torch.empty_like(q))

    def _graph_wrapper(self, key: GraphKey, columns: int) -> Any:
        """Build the decode wrapper of a graph bucket, with static buffers. All buckets share the page-number buffer.

        ``columns`` is the number of columns of the page table.
        """
        import flashinfer

        if self._indices is None:
            max_pages = max(k.rows for k in self._keys) * columns
            self._indices = torch.zeros(max_pages, dtype=torch.int32, device=self.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._floats,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(key.rows + 1, dtype=torch.int32, device=self.device),
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=torch.ones(key.rows, dtype=torch.int32, device=self.device),
        )
        self._staging["decode"].adopt(wrapper)
        return wrapper

    def plan(self, batch: AttnBatch) -> None:
        """Plan decode rows and prefill chunks. Planning only queues copies; the host does not wait for the device."""
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
            self._staging["decode"].plan(wrapper, lambda: wrapper.plan(*pages, *self._shape(), **self._options()))
        if self._num_extend:
            pages = self._pages(batch, n, rows)
            starts = batch.cu_seqlens_q_cpu[n:] - batch.cu_seqlens_q_cpu[n]
            self._prefill = self._prefills[packs_query_heads(starts, batch.seq_lens_cpu[n:], self._layer.q_heads)]
            self._plan_prefill(self._prefill, torch.from_numpy(starts), pages)

    def _plan_prefill(self, wrapper: Any, starts: torch.Tensor, pages: Sequence[torch.Tensor]) -> None:
        """Plan a prefill wrapper.

        ``starts`` [rows + 1] is the first query token of each row, on the host; ``pages`` is a result of `_pages`.
        """
        self._staging["prefill"].plan(
            wrapper, lambda: wrapper.plan(starts, *pages, *self._shape(), causal=True, **self._options())
        )

    def _shape(self) -> tuple[int, int, int, int]:
        """Return query heads, KV heads, head size and page size, in the order of FlashInfer's ``plan``."""
        return self._layer.q_heads, self._layer.kv_heads, self._layer.head_dim, self.pool.page_size

    def _options(self) -> dict[str, Any]:
        layer, dtype = self._layer, self.pool.dtype
        return {
            "window_left": layer.window - 1 if layer.window > 0 else -1,
            "logits_soft_cap": layer.soft_cap or None,
            "sm_scale": layer.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def _pages(self, batch: AttnBatch, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pages of rows ``first`` to ``last`` (exclusive) in FlashInfer's format.

        The result is: offsets of each row's pages (indptr) on the host, page numbers on the device, and the number of
        tokens in each row's last page on the host. All are int32.
        """
        size = self.pool.page_size
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
        """Compute the decode rows and the prefill chunks. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
        kv, n = self.pool.layer(layer.index), self._num_decode
        if n:
            self._decode.run(q[:n], kv, out=out[:n])
        if self._num_extend:
            self._prefill.run(q[n:], kv, out=out[n:])
        return out


def packs_query_heads(starts: I32, seq_lens: I32, q_heads: int) -> bool:
    """Return whether the prefill kernel that packs query heads (``fa2``) is the faster one for these rows.

    ``fa2`` fills a tile with the queries of all query heads that share a KV head. The other kernel (``fa3``, on Hopper)
    fills a tile with 128 tokens of one query head. ``fa2`` is faster if many rows have few tokens each, or if a row has
    a long prefix and so few tokens that few tiles share the work. Measurements: docs/benchmarks/attention.md.

    ``starts`` [rows + 1] is the first query token of each row; ``seq_lens`` is [rows].
    """
    rows, tokens = len(seq_lens), int(starts[-1])
    if tokens <= 64 * rows:
        return rows * q_heads >= 256
    return rows * q_heads <= 64 and int(seq_lens.max()) >= 4096 and tokens <= 128


class _ScheduleStaging:
    """Ring of pinned host buffers for schedules, and the device buffer that the schedules are copied to."""

    def __init__(self, device: torch.device):
        self._device_buffer = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=True) for _ in range(PINNED_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(PINNED_BUFFERS)]
        self._current = 0

    def adopt(self, wrapper: Any) -> None:
        """Make a wrapper use these buffers instead of its own. Wrappers run one at a time, so they can share them."""
        wrapper._int_workspace_buffer = self._device_buffer
        wrapper._pin_memory_int_workspace_buffer = self._pinned[0]

    def plan(self, wrapper: Any, plan: Callable[[], None]) -> None:
        """Run ``plan()`` with the next pinned buffer, after the last copy from that buffer has finished."""
        self._current = (self._current + 1) % PINNED_BUFFERS
        self._copied[self._current].synchronize()
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._current]
        plan()
        self._copied[self._current].record()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "flashinfer", FlashInfer
