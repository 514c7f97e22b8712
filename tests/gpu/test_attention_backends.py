"""Attention from other libraries on a GPU: flash_attn and trtllm beside flashinfer, against softmax in float64.

Over page sizes, query heads to a KV head, chunk boundaries, cached prefixes and mixed batches; in graphs too.
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
from minisgl.testing.attention import AttentionCase, lay_out, run_case

PACKAGES = {"flash_attn": "flash_attn.cute", "trtllm": "flashinfer", "flashinfer": "flashinfer"}
PAGES = {"flash_attn": (1, 16, 64, 128, 256), "trtllm": (16, 32, 64, 128), "flashinfer": (1, 16, 64, 128)}
# (positions before the step, positions computed): behind cached prefixes, and on both sides of pages and tiles.
MIXED = ((300, 1), (129, 1), (127, 1), (0, 1), (63, 1), (0, 290), (128, 128), (255, 3), (1000, 200), (16, 1000))
DECODE = ((300, 1), (129, 1), (127, 1), (0, 1), (2047, 1), (4096, 1))
BASE = AttentionCase(MIXED, q_heads=8, kv_heads=4, head_dim=128, dtype=torch.bfloat16)


def cases(name: str) -> Iterator[AttentionCase]:
    for page in PAGES[name]:
        yield replace(BASE, page_size=page)
    for q_heads, kv_heads in ((4, 4), (8, 2), (10, 2), (8, 1)):
        yield replace(BASE, q_heads=q_heads, kv_heads=kv_heads)
    yield replace(BASE, rows=DECODE)
    yield replace(BASE, rows=MIXED[5:])
    yield replace(BASE, q_heads=4, kv_heads=2, head_dim=64)
    yield replace(BASE, rows=((70, 1), *((40 + i, 3 + i % 40) for i in range(50))))  # many short chunks
    yield replace(BASE, rows=((5000, 100),))  # one behind a long prefix
    if name != "flashinfer":  # which compiles a window for a minute
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
    """What the cases of trtllm need, at once: one after another they would take some minutes."""
    from flashinfer.jit.core import build_jit_specs
    from flashinfer.jit.xqa import gen_xqa_module

    wanted = {
        (case.dtype, case.dtype, case.page_size, case.head_dim, case.q_heads // case.kv_heads, case.window >= 0)
        for case in cases("trtllm")
    }
    build_jit_specs([gen_xqa_module(*options, torch.bfloat16) for options in sorted(wanted, key=str)])


def made(name: str, device: torch.device) -> AttentionBackend:
    """The backend; where it computes decode rows only, with Triton for the others."""
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
    got, want = run_case(made(name, device), case, device)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert ((got - want).norm() / want.norm()).item() < 1e-2


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_graph_replays_decode_for_whatever_rows_come(name: str, page_size: int, device: torch.device) -> None:
    """Recorded on padding (every row at the scratch slot, one position), replayed on rows in two orders."""
    backend = made(name, device)
    laid = lay_out(replace(BASE, rows=DECODE, page_size=page_size), backend.needs().layout, device)
    rows, layer, batch = len(DECODE), laid.layers[1], laid.batch
    backend.bind(laid.pool, laid.layers, [GraphKey(rows)])
    slots = torch.full((rows,), batch.page_table.shape[0] - 1, dtype=torch.int32, device=device)
    seq_lens, q, out = torch.ones_like(slots), laid.q.clone(), torch.empty_like(laid.q)
    static = replace(
        batch, seq_lens_cpu=np.ones(rows, np.int32), req_pool_indices=slots, seq_lens=seq_lens, graph_key=GraphKey(rows)
    )
    backend.plan(static)
    backend.forward(layer, q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(layer, q, out)
    for order in (list(range(rows)), list(reversed(range(rows)))):
        slots.copy_(batch.req_pool_indices[order])
        seq_lens.copy_(batch.seq_lens[order])
        q.copy_(laid.q[order])
        backend.plan(replace(static, seq_lens_cpu=batch.seq_lens_cpu[order]))
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), laid.want[order], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", PACKAGES)
def test_planning_and_computing_wait_for_nothing(name: str, device: torch.device) -> None:
    backend = made(name, device)
    laid = lay_out(BASE, backend.needs().layout, device)
    backend.bind(laid.pool, laid.layers, [])
    backend.plan(laid.batch)
    laid.forward(backend)
    out = torch.empty_like(laid.q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.plan(laid.batch)
        backend.forward(laid.layers[1], laid.q, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "case", "why"),
    [
        ("trtllm", replace(BASE, soft_cap=2.0), "no soft cap"),
        ("trtllm", replace(BASE, head_dim=72), "head sizes that 16 divides"),
        ("flash_attn", replace(BASE, head_dim=80), "this model's are of 80"),
    ],
)
def test_says_what_it_can_not_compute(name: str, case: AttentionCase, why: str, device: torch.device) -> None:
    backend = made(name, device)
    pool = KVPool(2, 4, 16, case.kv_heads, case.head_dim, case.dtype, device)
    with pytest.raises(ConfigError, match=why):
        backend.bind(pool, lay_out(case).layers, [])


def test_trtllm_takes_no_prefill_rows(device: torch.device) -> None:
    made("trtllm", device)
    backend: AttentionBackend = PluginManager.load().build(
        "attention", PluginManager.load().make("attention", "trtllm"), device=device
    )
    laid = lay_out(BASE, device=device)
    backend.bind(laid.pool, laid.layers, [])
    batch: AttnBatch = laid.batch
    with pytest.raises(ValueError, match="decode rows only"):
        backend.plan(batch)
