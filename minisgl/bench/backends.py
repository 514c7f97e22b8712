"""The cases of ``minisgl.bench kernels`` that measure complete backends: paged attention, and experts.

Every attention and MoE plugin that is loaded and supports this GPU is one version of a case. This module names none of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from minisgl.attention import AttentionBackend, AttnBatch, LayerSpec
from minisgl.bench.timing import BF16, Case, random
from minisgl.config import ConfigError
from minisgl.kvcache.pool import KVPool
from minisgl.plugin_manager.manager import PluginManager

HEADS = {"0.6B, 8B: 16/8": (16, 8, 128), "14B: 40/8": (40, 8, 128), "30B-A3B: 32/4": (32, 4, 128)}


def usable_backends(group: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, backend) for every plugin of a group that supports this GPU, built with default options."""
    manager = PluginManager.load()
    manager.load_all(group)
    for name in sorted(manager.configs[group]):
        try:
            yield (
                name,
                manager.build(group, manager.make(group, name), device=torch.device("cuda"), **arguments),
            )
        except ConfigError:
            continue


# ---- attention ------------------------------------------------------------------------------------------------


def paged(
    rows: Sequence[tuple[int, int]], heads: tuple[int, int, int], page_size: int
) -> tuple[KVPool, LayerSpec, AttnBatch]:
    """Return a pool of random KV, a layer, and a batch whose rows are (positions to compute, KV length).

    The pages of a row are scattered over the pool.
    """
    device, (q_heads, kv_heads, dim) = torch.device("cuda"), heads
    needed = np.array([-(-seq_lens // page_size) for _, seq_lens in rows])
    pages = np.random.default_rng(0).permutation(int(needed.sum())).astype(np.int32)
    page_table = np.full((len(rows) + 1, int(needed.max())), len(pages), np.int32)
    for row, part in enumerate(np.split(pages, np.cumsum(needed)[:-1])):
        page_table[row, : len(part)] = part
    pool = KVPool(1, len(pages) + 1, page_size, kv_heads, dim, BF16, device)
    for kv in pool.layer(0):
        kv.normal_()
    counts = np.array([count for count, _ in rows])
    cu_seqlens_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    seq_lens = np.array([n for _, n in rows], np.int32)
    req_pool_indices = np.arange(len(rows), dtype=np.int32)
    on_device = [torch.from_numpy(a).to(device) for a in (cu_seqlens_q, seq_lens, req_pool_indices, page_table)]
    batch = AttnBatch(
        int((counts == 1).sum()), cu_seqlens_q, seq_lens, on_device[0], on_device[1], on_device[2], on_device[3]
    )
    return pool, LayerSpec(0, q_heads, kv_heads, dim, dim**-0.5), batch


def attention_case(kernel: str, shape: str, rows: Sequence[tuple[int, int]], heads: Any, page_size: int) -> Case:
    pool, layer, batch = paged(rows, heads, page_size)
    q_heads, kv_heads, dim = heads
    q = random(int(batch.cu_seqlens_q_cpu[-1]), q_heads, dim)
    positions = sum(seq_lens for _, seq_lens in rows)
    num_pairs = sum(
        count * seq_lens - count * (count - 1) / 2 for count, seq_lens in rows
    )  # pairs of a query and a key
    case = Case(kernel, shape, 2 * q.nbytes + positions * kv_heads * dim * 4, 4 * num_pairs * q_heads * dim)
    for name, backend in usable_backends("attention"):
        needs = backend.needs()
        phase = "decode" if batch.num_decode else "extend"
        if needs.refuse or phase not in needs.phases or (needs.page_sizes and page_size not in needs.page_sizes):
            continue
        case.versions[name] = attention_call(backend, pool, layer, batch, q)
    return case


def attention_call(
    backend: AttentionBackend, pool: KVPool, layer: LayerSpec, batch: AttnBatch, q: torch.Tensor
) -> Callable[[], Any]:
    out, planned = torch.empty_like(q), False

    def run() -> torch.Tensor:
        nonlocal planned
        if not planned:  # only in the first call, which is not captured in the CUDA graph
            backend.bind(pool, [layer], [])
            backend.plan(batch)
            planned = True
        return backend.forward(layer, q, out)

    return run


def decodes() -> Iterator[Case]:
    for name, heads in HEADS.items():
        for rows, length in ((1, 1024), (1, 16384), (64, 1024), (256, 600)):
            yield attention_case("decode", f"{name}, {rows} x {length}", [(1, length)] * rows, heads, 16)
    uneven = [(1, 100 + 7 * i) for i in range(128)]
    yield attention_case("decode", "16/8, 128 x 100…989", uneven, (16, 8, 128), 16)
    yield attention_case("decode", "16/8, 64 x 1024, page 1", [(1, 1024)] * 64, (16, 8, 128), 1)
    yield attention_case("decode", "16/8, 64 x 1024, page 64", [(1, 1024)] * 64, (16, 8, 128), 64)
    yield attention_case("decode", "16/8, 64 x 1024, page 128", [(1, 1024)] * 64, (16, 8, 128), 128)


def extends() -> Iterator[Case]:
    for name, heads in HEADS.items():
        yield attention_case("extend", f"{name}, 8 x 1024", [(1024, 1024)] * 8, heads, 16)
    yield attention_case("extend", "16/8, 8 x 1024, page 128", [(1024, 1024)] * 8, (16, 8, 128), 128)
    yield attention_case("extend", "16/8, 8192", [(8192, 8192)], (16, 8, 128), 16)
    yield attention_case("extend", "16/8, 2048 after 6144", [(2048, 8192)], (16, 8, 128), 16)
    yield attention_case("extend", "16/8, 128 x 64 after 2048", [(64, 2112)] * 128, (16, 8, 128), 16)


# ---- experts --------------------------------------------------------------------------------------------------


def experts() -> Iterator[Case]:
    """Yield cases with the experts of Qwen3-30B-A3B: 128 experts, hidden size 2048, inner size 768, top 8."""
    count, hidden, inner, top_k = 128, 2048, 768, 8
    gate_up, down = random(count, 2 * inner, hidden).mul_(0.02), random(count, hidden, inner).mul_(0.02)
    backends = [(name, moe, moe.load(gate_up, down, range(count), "silu")) for name, moe in usable_backends("moe")]
    for tokens in (1, 8, 64, 256, 2048, 8192):
        x, out = random(tokens, hidden), torch.empty(tokens, hidden, dtype=BF16, device="cuda")
        scale, ids = torch.rand(tokens, count, device="cuda").topk(top_k)
        ids = ids.int()
        weight_bytes = len(ids.unique()) * 3 * inner * hidden * 2
        case = Case("experts", f"{tokens} tokens", weight_bytes + 2 * x.nbytes, 6.0 * tokens * top_k * inner * hidden)
        for name, moe, weights in backends:
            case.versions[name] = partial(moe.forward, weights, x, ids, scale, out)
        yield case
