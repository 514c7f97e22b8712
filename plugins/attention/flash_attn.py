"""`attention=flash_attn`: FlashAttention 4, 3 or 2 (arXiv:2205.14135, 2307.08691, 2407.08608) over minisgl's KV pages.

Decode rows and prefill chunks of a step are computed in separate calls. The decode call has no query offsets, so a
graph can record it. The three packages take different arguments, and support different GPUs, head sizes and page
sizes. The end of the file has one function for each package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.attention import AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.plugins.kernels.attention import FusedStore
from minisgl.plugins.kernels.attention.page_table_rows import PageTableRows

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class FlashAttn:
    """FlashAttention: NVIDIA GPUs, bfloat16 or float16. FlashAttention 2 needs pages of 256, 512 or 1024 tokens."""

    version: int | None = None
    """Version of FlashAttention: 4, 3 or 2. By default the newest version that is installed and runs on this GPU."""

    def __post_init__(self) -> None:
        if self.version is not None and self.version not in RELEASES:
            raise ValueError(f"attention.version={self.version} is unknown: use 4, 3 or 2")

    def build(self, device: torch.device) -> FlashAttention:
        if device.type != "cuda":
            refuse = "FlashAttention needs a CUDA device; attention=torch runs anywhere"
            return FlashAttention(device, self.version or 4, None, refuse)
        version, refuse = choose(self.version, torch.cuda.get_device_capability(device))
        return FlashAttention(device, version, None if refuse else KERNELS[version](), refuse)


class Release(NamedTuple):
    """One of the three packages."""

    module: str  # a module that only this package installs
    majors: tuple[int, ...]  # major compute capabilities for which the package has kernels that read KV in pages
    chips: str  # the same as names of GPU generations, for error messages
    install: str  # how to install the package, for error messages
    head_dims: Sequence[int]  # head sizes that the kernels support over pages
    page_sizes: tuple[int, ...] | None = None  # supported page sizes; None: any


# Version 4 (4.0.0b36 on Hopper) accepts head sizes 80 and 96 over pages too, but computes wrong results. Version 2
# supports any multiple of 256 as page size; page sizes above 1024 are left out, because they waste too much of a page.
RELEASES = {
    4: Release(
        "flash_attn.cute",
        (9, 10, 11),
        "Hopper and Blackwell",
        "pip install 'minisgl[gpu]'",
        (32, 64, 128, 256),
    ),
    3: Release(
        "flash_attn_interface",
        (9,),
        "Hopper",
        "build the folder hopper/ of github.com/Dao-AILab/flash-attention",
        (64, 96, 128, 192, 256),
    ),
    2: Release(
        "flash_attn_2_cuda",
        (8, 9, 10, 12),
        "Ampere and later",
        "pip install flash-attn",
        (32, 64, 96, 128, 192, 256),
        (256, 512, 1024),
    ),
}


class Rows(NamedTuple):
    """Rows of one call. ``cu_seqlens_q`` is None if each row has one query token."""

    page_table: torch.Tensor  # [rows, columns] int32
    seq_lens: torch.Tensor  # [rows] int32
    max_seqlen_k: int  # upper bound of seq_lens
    num_splits: int = 1  # parts that a row's KV is split into; 0: the package decides
    max_seqlen_q: int = 1  # largest number of query tokens of a row
    cu_seqlens_q: torch.Tensor | None = None  # [rows + 1] int32: first query token of each row
    cu_seqlens_k: torch.Tensor | None = None  # [rows + 1] int32: cumulative seq_lens, which FlashAttention 2 needs


if TYPE_CHECKING:
    Kernel = Callable[[LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor, Rows, torch.Tensor], None]


class FlashAttention(FusedStore):
    """FlashAttention backend; `minisgl.attention.AttentionBackend` documents the methods.

    ``kernel`` calls the package of ``version``. It is None if ``refuse`` says why the package cannot run here.
    """

    def __init__(self, device: torch.device, version: int, kernel: Kernel | None, refuse: str = ""):
        self.device, self.version, self.refuse = device, version, refuse
        self._kernel = kernel
        self._decode: Rows | None = None
        self._extend: Rows | None = None
        self._num_decode = 0

    def needs(self) -> AttnNeeds:
        return AttnNeeds(
            page_sizes=RELEASES[self.version].page_sizes,
            kv_dtypes=(torch.bfloat16, torch.float16),
            graph=True,
            refuse=self.refuse,
        )

    def bind(self, pool: KVPool, layers: Sequence[LayerSpec], keys: Sequence[GraphKey]) -> None:
        """Store the pool. Raises `ConfigError` for a head size that the kernels do not support."""
        sizes = RELEASES[self.version].head_dims
        for dim in {layer.head_dim for layer in layers} - set(sizes):
            raise ConfigError(
                f"attention=flash_attn: FlashAttention {self.version} over pages supports head sizes "
                f"{', '.join(map(str, sizes))}, but this model has {dim}. Use attention=triton."
            )
        super().bind(pool, layers, keys)
        self._kv_heads = layers[0].kv_heads
        self._page_table_rows = PageTableRows(pool.page_size, keys)
        self._num_sms = 0  # multiprocessors to occupy by splitting KV (version 4); 0: its kernel cannot split here
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] > 9:
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def plan(self, batch: AttnBatch) -> None:
        """Gather the page-table rows. For a graph bucket they are gathered into a static buffer."""
        rows = len(batch.seq_lens_cpu)
        self._num_decode = n = batch.num_decode
        self._decode = self._extend = None
        if n:
            max_seqlen_k = self._page_table_rows.max_seq_len(batch, 0, n)
            page_table = self._page_table_rows.gather(batch, 0, n)
            self._decode = Rows(page_table, batch.seq_lens[:n], max_seqlen_k, self._num_splits(n, max_seqlen_k))
        if rows > n:
            page_table, seq_lens = self._page_table_rows.gather(batch, n, rows), batch.seq_lens[n:]
            cu_seqlens_q = batch.cu_seqlens_q[n:] - batch.cu_seqlens_q[n] if n else batch.cu_seqlens_q
            cu_seqlens_k = None
            if self.version == 2:
                cu_seqlens_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            self._extend = Rows(
                page_table,
                seq_lens,
                self._page_table_rows.max_seq_len(batch, n, rows),
                max_seqlen_q=int((batch.cu_seqlens_q_cpu[n + 1 :] - batch.cu_seqlens_q_cpu[n:-1]).max()),
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
            )

    def _num_splits(self, rows: int, max_seqlen_k: int) -> int:
        """Return into how many parts the KV of a decode row is split; 0 lets the package decide.

        FlashAttention 4 would decide on the host from the sequence lengths, and a graph would keep the decision of its
        recording. So the number is given, derived from shapes only. The Hopper kernel of version 4 cannot split.
        Versions 2 and 3 decide from shapes, and version 3 refines the decision on the device.
        """
        if self.version != 4:
            return 0
        return max(1, min(self._num_sms // (rows * self._kv_heads), -(-max_seqlen_k // 128), 128))

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute the decode rows and the prefill chunks. ``q`` and ``out`` are [tokens, q_heads, head_dim]."""
        assert self._kernel is not None
        k, v = self.pool.layer(layer.index)
        n = self._num_decode
        if self._decode is not None:
            self._kernel(layer, q[:n].unsqueeze(1), k, v, self._decode, out[:n].unsqueeze(1))
        if self._extend is not None:
            self._kernel(layer, q[n:], k, v, self._extend, out[n:])
        return out


# ---- the packages ---------------------------------------------------------------------------------------------


def window(layer: LayerSpec, unlimited: int | None) -> tuple[int | None, int | None]:
    """Return how many keys before and after its own position a query attends to; ``unlimited`` if without window."""
    return (layer.window - 1, 0) if layer.window >= 0 else (unlimited, unlimited)


def kernel_4() -> Kernel:
    """Return a function that calls FlashAttention 4."""
    from flash_attn.cute.interface import _flash_attn_fwd  # the public function has no parameter ``out``

    def attend(
        layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        left, right = window(layer, None)
        _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=rows.cu_seqlens_q,
            seqused_k=rows.seq_lens,
            max_seqlen_k=rows.max_seqlen_k,
            page_table=rows.page_table,
            softmax_scale=layer.scale,
            causal=rows.cu_seqlens_q is not None,
            softcap=layer.soft_cap or None,
            window_size_left=left,
            window_size_right=right,
            num_splits=rows.num_splits,
            out=out,
        )

    return attend


def kernel_3() -> Kernel:
    """Return a function that calls FlashAttention 3."""
    from flash_attn_interface import flash_attn_with_kvcache

    def attend(
        layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        computed = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=rows.seq_lens,
            page_table=rows.page_table,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_seqlen_q,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window(layer, -1),
            softcap=layer.soft_cap,
            num_splits=rows.num_splits,
        )
        out.copy_(computed)

    return attend


def kernel_2() -> Kernel:
    """Return a function that calls FlashAttention 2."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def attend(
        layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        options: dict[str, Any] = {
            "softmax_scale": layer.scale,
            "causal": True,
            "window_size": window(layer, -1),
            "softcap": layer.soft_cap,
            "block_table": rows.page_table,
        }
        if rows.cu_seqlens_q is None:
            computed = flash_attn_with_kvcache(
                q, k, v, cache_seqlens=rows.seq_lens, num_splits=rows.num_splits, **options
            )
        else:
            lengths = (rows.cu_seqlens_q, rows.cu_seqlens_k, rows.max_seqlen_q, rows.max_seqlen_k)
            computed = flash_attn_varlen_func(q, k, v, *lengths, **options)
        out.copy_(computed)

    return attend


KERNELS = {4: kernel_4, 3: kernel_3, 2: kernel_2}


def installed(version: int) -> bool:
    """Return whether the package of ``version`` is installed, without importing the module itself."""
    try:
        return importlib.util.find_spec(RELEASES[version].module) is not None
    except ModuleNotFoundError:  # the parent package of the module is missing
        return False


def choose(requested: int | None, capability: tuple[int, int]) -> tuple[int, str]:
    """Choose the version for a GPU. Return the version, and why it cannot run here ("": it can).

    ``requested`` is the option ``attention.version``, ``capability`` the compute capability of the GPU.
    """
    available = [v for v in RELEASES if installed(v)]
    runnable = [v for v in available if capability[0] in RELEASES[v].majors]
    if requested is None and runnable:
        return runnable[0], ""
    version = requested or (available or [v for v in RELEASES if capability[0] in RELEASES[v].majors] or [2])[0]
    chips = RELEASES[version].chips
    if capability[0] not in RELEASES[version].majors:
        gpu = f"this GPU has compute capability {capability[0]}.{capability[1]}"
        return version, f"FlashAttention {version} reads KV pages only on {chips}; {gpu}. Use attention=triton."
    if version not in available:
        what = f"FlashAttention {version} is not" if requested else "no FlashAttention is"
        return version, f"{what} installed. Try: {RELEASES[version].install}"
    return version, ""


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "flash_attn", FlashAttn
