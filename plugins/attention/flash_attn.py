"""`attention=flash_attn`: FlashAttention 4, 3 or 2 (arXiv:2205.14135, 2307.08691, 2407.08608) over our pages.

Decode rows and prefill chunks of a step are a call each: decode without query offsets, so that a graph can hold it.
What differs between the three packages is how they are called, and is one function each at the end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.attention import AttnBatch, AttnNeeds, GraphKey, LayerSpec
from minisgl.attention.tables import RowTables
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass
class FlashAttn:
    """FlashAttention: NVIDIA GPUs, bfloat16 or float16. FlashAttention 2 takes pages of 256 tokens or a multiple."""

    version: int | None = None
    """4, 3 or 2; by default the newest that is installed and runs on this GPU."""

    def __post_init__(self) -> None:
        if self.version is not None and self.version not in RELEASES:
            raise ValueError(f"attention.version={self.version}: FlashAttention 4, 3 and 2 are known")


class Release(NamedTuple):
    """One of the packages."""

    module: str  # that only this one installs
    majors: tuple[int, ...]  # compute capabilities whose kernels read KV in pages
    chips: str
    install: str
    head_dims: Sequence[int]
    page_sizes: tuple[int, ...] | None = None


# Version 4 (4.0.0b36 on Hopper) also computes heads of 80 and 96 over pages, and wrongly. Version 2's pages may be any
# multiple of 256; larger ones than these waste more of a page than they save.
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
    """The rows of one call. ``starts`` is None where each row has one query."""

    table: torch.Tensor  # [rows, columns] int32
    seq_lens: torch.Tensor  # [rows] int32
    kv_most: int
    splits: int = 1  # parts that a row's KV is cut into; 0: the package decides, from shapes alone or on the device
    q_most: int = 1
    starts: torch.Tensor | None = None  # of the rows' queries, [rows + 1] int32
    kv_starts: torch.Tensor | None = None  # of their keys, as if these lay in one array; for FlashAttention 2


if TYPE_CHECKING:
    Kernel = Callable[[LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor, Rows, torch.Tensor], None]


class FlashAttention:
    """See `minisgl.attention.AttentionBackend` for what is asked for and when."""

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
        """Raises `ConfigError` for a head size that the kernels do not have."""
        sizes = RELEASES[self.version].head_dims
        for dim in {layer.head_dim for layer in layers} - set(sizes):
            raise ConfigError(
                f"attention=flash_attn: FlashAttention {self.version} over pages serves heads of "
                f"{', '.join(map(str, sizes))}; this model's are of {dim}. Use attention=triton."
            )
        self._pool, self._kv_heads = pool, layers[0].kv_heads
        self._tables = RowTables(pool.page_size, keys)
        self._processors = 0  # that splitting KV could keep busy
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] > 9:
            self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def plan(self, batch: AttnBatch) -> None:
        """Gather the rows' pages; where decode rows are captured, into memory that stays."""
        rows = len(batch.seq_lens_cpu)
        self._num_decode = n = batch.num_decode
        self._decode = self._extend = None
        if n:
            longest = self._tables.longest(batch, 0, n)
            table = self._tables.gather(batch, 0, n)
            self._decode = Rows(table, batch.seq_lens[:n], longest, self._splits(n, longest))
        if rows > n:
            table, seq_lens = self._tables.gather(batch, n, rows), batch.seq_lens[n:]
            starts = batch.cu_seqlens_q[n:] - batch.cu_seqlens_q[n] if n else batch.cu_seqlens_q
            kv_starts = None
            if self.version == 2:
                kv_starts = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            q_most = int((batch.cu_seqlens_q_cpu[n + 1 :] - batch.cu_seqlens_q_cpu[n:-1]).max())
            longest = self._tables.longest(batch, n, rows)
            self._extend = Rows(table, seq_lens, longest, q_most=q_most, starts=starts, kv_starts=kv_starts)

    def _splits(self, rows: int, longest: int) -> int:
        """FlashAttention 4 would choose on the host from lengths, and a graph would keep the first choice: so it is
        told. Its Hopper kernel can't split. The others choose from shapes, and version 3 refines it on the device."""
        if self.version != 4:
            return 0
        return max(1, min(self._processors // (rows * self._kv_heads), -(-longest // 128), 128))

    def forward(self, layer: LayerSpec, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """q, out [tokens, q_heads, head_dim]."""
        assert self._kernel is not None
        k, v = self._pool.layer(layer.index)
        n = self._num_decode
        if self._decode is not None:
            self._kernel(layer, q[:n].unsqueeze(1), k, v, self._decode, out[:n].unsqueeze(1))
        if self._extend is not None:
            self._kernel(layer, q[n:], k, v, self._extend, out[n:])
        return out


# ---- the packages ---------------------------------------------------------------------------------------------


def window(layer: LayerSpec, unlimited: int | None) -> tuple[int | None, int | None]:
    """Keys before a query's own that it sees, and keys behind it."""
    return (layer.window - 1, 0) if layer.window >= 0 else (unlimited, unlimited)


def kernel_4() -> Kernel:
    from flash_attn.cute.interface import _flash_attn_fwd  # the public function has no ``out``

    def attend(
        layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        left, right = window(layer, None)
        _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=rows.starts,
            seqused_k=rows.seq_lens,
            max_seqlen_k=rows.kv_most,
            page_table=rows.table,
            softmax_scale=layer.scale,
            causal=rows.starts is not None,
            softcap=layer.soft_cap or None,
            window_size_left=left,
            window_size_right=right,
            num_splits=rows.splits,
            out=out,
        )

    return attend


def kernel_3() -> Kernel:
    from flash_attn_interface import flash_attn_with_kvcache

    def attend(
        layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        computed = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=rows.seq_lens,
            page_table=rows.table,
            cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.q_most,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window(layer, -1),
            softcap=layer.soft_cap,
            num_splits=rows.splits,
        )
        out.copy_(computed)

    return attend


def kernel_2() -> Kernel:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def attend(
        layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        options: dict[str, Any] = {
            "softmax_scale": layer.scale,
            "causal": True,
            "window_size": window(layer, -1),
            "softcap": layer.soft_cap,
            "block_table": rows.table,
        }
        if rows.starts is None:
            computed = flash_attn_with_kvcache(q, k, v, cache_seqlens=rows.seq_lens, num_splits=rows.splits, **options)
        else:
            starts = (rows.starts, rows.kv_starts)
            computed = flash_attn_varlen_func(q, k, v, *starts, rows.q_most, rows.kv_most, **options)
        out.copy_(computed)

    return attend


KERNELS = {4: kernel_4, 3: kernel_3, 2: kernel_2}


def installed(version: int) -> bool:
    """Whether the package is there, without importing more of it than Python must."""
    try:
        return importlib.util.find_spec(RELEASES[version].module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def choose(wanted: int | None, capability: tuple[int, int]) -> tuple[int, str]:
    """The version for a GPU, and why it can't serve ("" where it can)."""
    there = [v for v in RELEASES if installed(v)]
    fitting = [v for v in there if capability[0] in RELEASES[v].majors]
    if wanted is None and fitting:
        return fitting[0], ""
    version = wanted or (there or [v for v in RELEASES if capability[0] in RELEASES[v].majors] or [2])[0]
    chips = RELEASES[version].chips
    if capability[0] not in RELEASES[version].majors:
        this = f"this GPU has compute capability {capability[0]}.{capability[1]}"
        return version, f"FlashAttention {version} reads pages on {chips}; {this}. Use attention=triton."
    if version not in there:
        what = f"FlashAttention {version}" if wanted else "no FlashAttention"
        return version, f"{what} is {'not ' if wanted else ''}installed. Try: {RELEASES[version].install}"
    return version, ""


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "attention", "flash_attn", FlashAttn


@hookimpl
def minisgl_attention(config: Any, device: torch.device) -> FlashAttention | None:
    if not isinstance(config, FlashAttn):
        return None
    if device.type != "cuda":
        refuse = "FlashAttention needs a CUDA device; attention=torch runs anywhere"
        return FlashAttention(device, config.version or 4, None, refuse)
    version, refuse = choose(config.version, torch.cuda.get_device_capability(device))
    return FlashAttention(device, version, None if refuse else KERNELS[version](), refuse)
