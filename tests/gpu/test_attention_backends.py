"""The attention backends of other libraries on a GPU, compared with softmax in float64.

The backends are flash_attn, trtllm and flashinfer. Cases cover page sizes, query heads per KV head, chunk boundaries,
cached prefixes, mixed batches and CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionBackend, AttnBatch, GraphKey
from minisgl.config import ConfigError
from minisgl.kvcache.pool import KVPool
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.hybrid import Hybrid
from minisgl.testing.attention import AttentionCase, prepare_case, run_case

PACKAGES = {"flash_attn": "flash_attn.cute", "trtllm": "flashinfer", "flashinfer": "flashinfer"}
PAGES = {"flash_attn": (1, 16, 64, 128, 256), "trtllm": (16, 32, 64, 128), "flashinfer": (1, 16, 64, 128)}
# (cached positions, positions computed in the step): cached prefixes, and lengths around page and tile boundaries.
MIXED = ((300, 1), (129, 1), (127, 1), (0, 1), (63, 1), (0, 290), (128, 128), (255, 3), (1000, 200), (16, 1000))
DECODE = ((300, 1), (129, 1), (127, 1), (0, 1), (2047, 1), (4096, 1))
BASE = AttentionCase(MIXED, q_heads=8, kv_heads=4, head_dim=128, dtype=torch.bfloat16)


def cases(name: str) -> Iterator[AttentionCase]:
    """Yield the cases that the backend ``name`` supports."""
    for page in PAGES[name]:
        yield replace(BASE, page_size=page)
    for q_heads, kv_heads in ((4, 4), (8, 2), (10, 2), (8, 1)):
        yield replace(BASE, q_heads=q_heads, kv_heads=kv_heads)
    yield replace(BASE, rows=DECODE)
    yield replace(BASE, rows=MIXED[5:])
    yield replace(BASE, q_heads=4, kv_heads=2, head_dim=64)
    yield replace(BASE, rows=((70, 1), *((40 + i, 3 + i % 40) for i in range(50))))  # many short chunks
    yield replace(BASE, rows=((5000, 100),))  # one chunk after a long cached prefix
    if name != "flashinfer":  # FlashInfer compiles for a minute for each window
        yield replace(BASE, window=100)
    if name == "flash_attn":
        yield replace(BASE, window=1, page_size=1)
        yield replace(BASE, soft_cap=2.0)
        yield replace(BASE, window=100, soft_cap=2.0, page_size=128)
        yield replace(BASE, q_heads=6, kv_heads=2)
        yield from (replace(BASE, head_dim=dim) for dim in (32, 256))
        yield replace(BASE, dtype=torch.float16)


@functools.cache
def compile_xqa() -> None:
    """Compile all kernels that the cases of trtllm need in parallel: one after another they would take minutes."""
    from flashinfer.jit.core import build_jit_specs
    from flashinfer.jit.xqa import gen_xqa_module

    wanted = {
        (case.dtype, case.dtype, case.page_size, case.head_dim, case.q_heads // case.kv_heads, case.window >= 0)
        for case in cases("trtllm")
    }
    build_jit_specs([gen_xqa_module(*options, torch.bfloat16) for options in sorted(wanted, key=str)])


def build(name: str, device: torch.device) -> AttentionBackend:
    """Build the backend ``name``.

    trtllm computes decode rows only; it is combined with Triton for prefill rows.
    """
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    pytest.importorskip(PACKAGES[name], reason=f"attention={name} needs a package that is not installed here")
    if name == "trtllm":
        compile_xqa()
    manager = PluginManager.load()
    config = Hybrid(prefill="triton", decode=name) if name == "trtllm" else manager.make("attention", name)
    backend: AttentionBackend = manager.build("attention", config, device=device)
    assert not backend.needs().refuse
    return backend


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, case, id=f"{name}-{case}") for name in PACKAGES for case in cases(name)]
)
def test_agrees_with_softmax_in_float64(name: str, case: AttentionCase, device: torch.device) -> None:
    got, want = run_case(build(name, device), case, device)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert ((got - want).norm() / want.norm()).item() < 1e-2


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", PACKAGES)
def test_graph_replay(name: str, page_size: int, device: torch.device) -> None:
    """A graph captured with padding rows (scratch row of the page table, length 1) replays any rows, in two orders."""
    backend = build(name, device)
    prepared = prepare_case(replace(BASE, rows=DECODE, page_size=page_size), backend.needs().layout, device)
    rows, layer, batch = len(DECODE), prepared.layers[1], prepared.batch
    backend.bind(prepared.pool, prepared.layers, [GraphKey(rows)])
    req_pool_indices = torch.full((rows,), batch.page_table.shape[0] - 1, dtype=torch.int32, device=device)
    seq_lens, q, out = torch.ones_like(req_pool_indices), prepared.q.clone(), torch.empty_like(prepared.q)
    static = replace(
        batch,
        seq_lens_cpu=np.ones(rows, np.int32),
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        graph_key=GraphKey(rows),
    )
    backend.plan(static)
    backend.forward(layer, q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(layer, q, out)
    for order in (list(range(rows)), list(reversed(range(rows)))):
        req_pool_indices.copy_(batch.req_pool_indices[order])
        seq_lens.copy_(batch.seq_lens[order])
        q.copy_(prepared.q[order])
        backend.plan(replace(static, seq_lens_cpu=batch.seq_lens_cpu[order]))
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), prepared.expected[order], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", PACKAGES)
def test_no_device_synchronisation(name: str, device: torch.device) -> None:
    """Neither ``plan`` nor ``forward`` makes the host wait for the device."""
    backend = build(name, device)
    prepared = prepare_case(BASE, backend.needs().layout, device)
    backend.bind(prepared.pool, prepared.layers, [])
    backend.plan(prepared.batch)
    prepared.forward(backend)
    out = torch.empty_like(prepared.q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.plan(prepared.batch)
        backend.forward(prepared.layers[1], prepared.q, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "case", "why"),
    [
        ("trtllm", replace(BASE, soft_cap=2.0), "do not support the soft cap"),
        ("trtllm", replace(BASE, head_dim=72), "multiples of 16"),
        ("flash_attn", replace(BASE, head_dim=80), "but this model has 80"),
    ],
)
def test_unsupported_layers_are_refused(name: str, case: AttentionCase, why: str, device: torch.device) -> None:
    backend = build(name, device)
    pool = KVPool(2, 4, 16, case.kv_heads, case.head_dim, case.dtype, device)
    with pytest.raises(ConfigError, match=why):
        backend.bind(pool, prepare_case(case).layers, [])


def test_trtllm_refuses_prefill_rows(device: torch.device) -> None:
    build("trtllm", device)
    backend: AttentionBackend = PluginManager.load().build(
        "attention", PluginManager.load().make("attention", "trtllm"), device=device
    )
    prepared = prepare_case(BASE, device=device)
    backend.bind(prepared.pool, prepared.layers, [])
    batch: AttnBatch = prepared.batch
    with pytest.raises(ValueError, match="decode rows only"):
        backend.plan(batch)
