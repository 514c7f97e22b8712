"""``attention=triton`` compared with softmax in float64 and with ``attention=torch``.

Each row's pages are scattered over the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from minisgl.attention import AttnBatch, GraphKey, LayerSpec
from minisgl.kvcache.pool import KVPool
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.plugins.attention.triton import Triton, TritonAttention
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows


@dataclass(frozen=True)
class Case:
    """A batch; ``rows`` lists (positions computed in the step, KV length), so (1, n) is a decode row."""

    rows: list[tuple[int, int]]
    page_size: int = 16
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = -1
    soft_cap: float = 0.0
    sinks: bool = False  # whether each head has an attention sink; scores are about 1
    programs: int = 64  # decode splits rows until about this many programs run, over all rows and heads
    layout: str = "NHD"
    spec: LayerSpec = field(init=False)

    def __post_init__(self) -> None:
        heads = (self.q_heads, self.kv_heads, self.head_dim)
        object.__setattr__(self, "spec", LayerSpec(1, *heads, self.head_dim**-0.5, self.window, self.soft_cap))


DECODE = [(1, 1), (1, 70), (1, 129), (1, 16)]
MIXED = [(1, 40), (1, 3), (33, 33), (5, 70), (17, 34)]
CASES = {
    "decode": Case(DECODE),
    "decode, not split": Case(DECODE, programs=1),
    "decode, one row": Case([(1, 300)]),
    "decode, page 1": Case(DECODE, page_size=1),
    "decode, page 64": Case(DECODE, page_size=64),
    "decode, page 24": Case(DECODE, page_size=24),
    "decode, one kv head": Case(DECODE, q_heads=3, kv_heads=1),
    "decode, no groups": Case(DECODE, q_heads=2),
    "decode, 20 heads a group": Case([(1, 70)], q_heads=20, kv_heads=1, head_dim=16),
    "decode, window": Case(DECODE, window=20),
    "decode, window, not split": Case(DECODE, window=20, programs=1),
    "decode, soft cap": Case(DECODE, soft_cap=2.0),
    "decode, sinks": Case(DECODE, sinks=True, soft_cap=2.0),
    "decode, sinks, window, not split": Case(DECODE, sinks=True, window=20, programs=1, q_heads=6),
    "decode, heads before tokens": Case(DECODE, layout="HND"),
    "prefill": Case([(20, 20), (64, 64), (1, 1)]),
    "chunk behind a cached prefix": Case([(7, 71), (16, 48)]),
    "mixed": Case(MIXED),
    "mixed, page 1": Case(MIXED, page_size=1),
    "mixed, page 64, head 128": Case(MIXED, page_size=64, head_dim=128),
    "mixed, head 80, 5 heads a group": Case(MIXED, q_heads=5, kv_heads=1, head_dim=80),
    "mixed, window": Case(MIXED, window=9),
    "mixed, soft cap": Case(MIXED, soft_cap=3.0),
    "mixed, sinks, 3 heads a group": Case(MIXED, sinks=True, window=9, q_heads=6),
}
LARGE = {
    "decode": Case([(1, 1 + 37 * i) for i in range(48)], q_heads=16, kv_heads=8, head_dim=128, programs=528),
    "decode, long": Case([(1, 9000), (1, 20000)], q_heads=16, kv_heads=8, head_dim=128, programs=528),
    "decode, page 1": Case([(1, 700)] * 3, q_heads=32, kv_heads=4, head_dim=128, page_size=1, programs=528),
    "prefill": Case([(1000, 1000), (513, 2048)], q_heads=16, kv_heads=8, head_dim=128),
    "mixed": Case([(1, 999)] * 5 + [(700, 1500), (3, 4000)], q_heads=8, kv_heads=1, head_dim=128, page_size=64),
    "mixed, head 256": Case([(1, 99)] * 5 + [(70, 150)], q_heads=8, kv_heads=4, head_dim=256),
}


class Setup:
    """A pool in which each row's KV is in scattered pages of its own; all other memory is NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator):
        self.case = case
        size, rng = case.page_size, np.random.default_rng(len(case.rows))
        needed = [-(-seq_len // size) for _, seq_len in case.rows]
        num_pages = sum(needed) + 3
        pages = rng.permutation(num_pages).astype(np.int32)
        rows, columns = len(case.rows), max(needed) + 2
        # All entries are the scratch page, the last page of the pool, until pages are assigned below.
        page_table = np.full((rows + 2, columns), num_pages, np.int32)
        self.req_pool_indices = rng.permutation(rows + 1)[:rows].astype(np.int32)
        allocated = 0
        for req_pool_idx, count in zip(self.req_pool_indices, needed, strict=True):
            page_table[req_pool_idx, :count] = pages[allocated : allocated + count]
            allocated += count
        heads = (case.kv_heads, case.head_dim)
        self.pool = KVPool(2, num_pages + 1, size, *heads, dtype, device, case.layout)  # type: ignore[arg-type]
        self.k, self.v = self.pool.layer(1)
        self.k.fill_(float("nan"))
        self.v.fill_(float("nan"))
        self.rows_kv = []
        for req_pool_idx, (count, seq_len) in zip(self.req_pool_indices, case.rows, strict=True):
            position = np.arange(seq_len)
            out_cache_loc = torch.from_numpy(
                page_table[req_pool_idx, position // size].astype(np.int64) * size + position % size
            )
            kv = torch.randn(2, seq_len, *heads, generator=generator, device=device).to(dtype)
            self.pool.store(1, kv[0], kv[1], out_cache_loc.to(device))
            if case.window >= 0:  # pages behind the window of the first query may be another request's (`groups`)
                page_table[req_pool_idx, : max(seq_len - count - case.window + 1, 0) // size] = num_pages
            self.rows_kv.append(kv)
        counts = [count for count, _ in case.rows]
        cu_seqlens_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        seq_lens = np.array([n for _, n in case.rows], np.int32)
        decode = next((i for i, count in enumerate(counts) if count > 1), rows)
        on_device = [
            torch.from_numpy(a).to(device) for a in (cu_seqlens_q, seq_lens, self.req_pool_indices, page_table)
        ]
        self.batch = AttnBatch(decode, cu_seqlens_q, seq_lens, *on_device)
        shape = (int(cu_seqlens_q[-1]), case.q_heads, case.head_dim)
        self.q = torch.randn(shape, generator=generator, device=device).to(dtype)
        sinks = torch.linspace(-2, 4, case.q_heads, device=device).to(dtype) if case.sinks else None
        self.layer = replace(case.spec, sinks=sinks)

    def run(self, backend: TritonAttention | TorchAttention) -> torch.Tensor:
        """Plan the batch and return the backend's output."""
        backend.bind(self.pool, [replace(self.layer, index=0), self.layer], [])
        backend.plan(self.batch)
        out = torch.full_like(self.q, float("nan"))
        assert backend.forward(self.layer, self.q, out) is out
        return out

    def reference(self) -> torch.Tensor:
        """Compute softmax attention over each row's KV, one row after another, in float64."""
        case, outs = self.case, []
        for (count, seq_len), begin, kv in zip(case.rows, self.batch.cu_seqlens_q_cpu, self.rows_kv, strict=False):
            q = self.q[begin : begin + count].double().transpose(0, 1)
            k, v = kv.double().repeat_interleave(case.q_heads // case.kv_heads, dim=2).transpose(1, 2)
            scores = q @ k.transpose(1, 2) * case.spec.scale
            if case.soft_cap:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            position = torch.arange(seq_len - count, seq_len, device=q.device)[:, None]
            key = torch.arange(seq_len, device=q.device)[None]
            masked = key > position
            if case.window >= 0:
                masked |= key <= position - case.window
            scores = scores.masked_fill(masked, float("-inf"))
            if self.layer.sinks is not None:
                sinks = self.layer.sinks.double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat((scores, sinks), dim=-1)
            outs.append((scores.softmax(-1)[..., :seq_len] @ v).transpose(0, 1))
        return torch.cat(outs)


def backend(case: Case, device: torch.device) -> TritonAttention:
    """Return the Triton backend, set to split decode into ``case.programs`` programs."""
    made = TritonAttention(Triton(), device)
    made.programs = case.programs
    return made


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Check the relative error of the whole tensor, and the largest error of any element."""
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error < {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[out.dtype]
    # Check single elements too: a mask that is wrong for one position hardly changes the norm.
    limit = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[out.dtype]
    assert (out.double() - expected).abs().max().item() < limit * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_softmax_in_float64(
    name: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator, compiled: bool
) -> None:
    half = name in ("decode", "mixed", "mixed, page 64, head 128") or "sinks" in name
    if not compiled and dtype == torch.float16 and not half:
        pytest.skip("tested in float32 only: the interpreter is slow")
    setup = Setup(CASES[name], dtype, device, generator)
    assert_close(setup.run(backend(setup.case, device)), setup.reference())


@pytest.mark.parametrize("name", LARGE)
def test_large_sizes(
    name: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator, compiled: bool
) -> None:
    if not compiled:
        pytest.skip("too large for the interpreter")
    setup = Setup(LARGE[name], dtype, device, generator)
    assert_close(setup.run(backend(setup.case, device)), setup.reference())


SHARED = {
    "one block": (Case([(1, 70), (1, 129), (1, 65), (1, 200)]), 64),
    "not split": (Case([(1, 170), (1, 129), (1, 145), (1, 200)], programs=1), 128),
    "in shares": (Case([(1, 301), (1, 370)], programs=64), 288),
    "page 24, 3 heads a group": (Case([(1, 100), (1, 97)], q_heads=3, kv_heads=1, page_size=24), 96),
    "more rows than a tile": (Case([(1, 40 + i) for i in range(70)], q_heads=4, kv_heads=1, head_dim=16), 32),
    "soft cap and sinks": (Case([(1, 70), (1, 80)], soft_cap=2.0, sinks=True), 64),
    "a window": (Case([(1, 70), (1, 80)], window=20), 64),
    "nothing": (Case([(1, 70), (1, 16)]), 0),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_prefix(
    name: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator, compiled: bool
) -> None:
    """The shared prefix is read through the first row's page table: the entries of the other rows are invalid pages."""
    if not compiled and dtype == torch.float16 and "sinks" not in name:
        pytest.skip("tested in float32 only: the interpreter is slow")
    case, tokens = SHARED[name]
    setup = Setup(case, dtype, device, generator)
    for kv in setup.rows_kv[1:]:
        kv[:, :tokens] = setup.rows_kv[0][:, :tokens]
    pages, first, *others = tokens // case.page_size, *setup.req_pool_indices.tolist()
    if case.window < 0:
        setup.batch.page_table[others, :pages] = setup.pool.num_pages + 1000
    else:
        setup.batch.page_table[others, :pages] = setup.batch.page_table[first, :pages]
    setup.batch = replace(setup.batch, shared_prefix_len=torch.tensor([tokens], dtype=torch.int32, device=device))
    assert_close(setup.run(backend(case, device)), setup.reference())


QUANTIZED = {
    "one head a group": Case(DECODE, head_dim=128, q_heads=2),
    "two groups of 128 in a head": Case(DECODE[:2], head_dim=256),
    "five rows, five heads a group": Case([*DECODE, (1, 33)], head_dim=128, q_heads=10),
}


@pytest.mark.parametrize("shared", [False, True], ids=["no prefix", "shared prefix"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_decode_quantizes(
    name: str, shared: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """The merge of the parts has the result of two launches: attention, and the quantisation of its rounded result."""
    setup = Setup(QUANTIZED[name], dtype, device, generator)
    if shared:  # of length 0: the merge still reads one part for it
        setup.batch = replace(setup.batch, shared_prefix_len=torch.zeros(1, dtype=torch.int32, device=device))
    made, spec = backend(setup.case, device), setup.case.spec
    from minisgl.plugins.kernels.ops.triton.quantize import (
        quantize_rows,  # on a machine without Triton, the import fails
    )

    expected = quantize_rows(setup.run(made).flatten(1))
    assert made._quantizes(spec, len(setup.q))
    rows = QuantizedRows.empty(setup.q, expected.values.shape[1])
    made._forward_quantized(spec, setup.q, rows)
    assert rows.dtype == dtype
    assert torch.equal(rows.factors, expected.factors)
    assert torch.equal(rows.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize(
    "case", [Case(DECODE, head_dim=64), Case(DECODE, head_dim=128, programs=1), Case(MIXED, head_dim=128)]
)
def test_not_every_step_quantizes(case: Case, device: torch.device, generator: torch.Generator) -> None:
    """Heads without whole groups, rows that are not split, and steps with prompts have no launch that quantises."""
    setup = Setup(case, torch.float32, device, generator)
    made = backend(case, device)
    setup.run(made)
    assert not made._quantizes(case.spec, len(setup.q))


def test_agrees_with_attention_torch(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    setup = Setup(CASES["mixed"], dtype, device, generator)
    for memory in (setup.k, setup.v):  # attention=torch needs a pool without NaN, like the engine's
        memory.nan_to_num_(0.0)
    expected = setup.run(TorchAttention(Torch(), device))
    assert_close(setup.run(backend(setup.case, device)), expected.double())


def test_graph_replay(device: torch.device, generator: torch.Generator, compiled: bool) -> None:
    """A graph captured with padding rows (scratch row of the page table, length 1) replays rows of any lengths."""
    if not compiled:
        pytest.skip("needs a CUDA device: CUDA graphs")
    case = replace(CASES["decode"], rows=[(1, 5), (1, 900), (1, 64), (1, 333)], programs=528)
    setup = Setup(case, torch.bfloat16, device, generator)
    rows, batch, made = len(case.rows), setup.batch, backend(case, device)
    made.bind(setup.pool, [replace(case.spec, index=0), case.spec], [GraphKey(rows)])
    scratch = torch.full((rows,), rows + 1, dtype=torch.int32, device=device)
    req_pool_indices, seq_lens = scratch.clone(), torch.ones_like(scratch)
    static = replace(batch, req_pool_indices=req_pool_indices, seq_lens=seq_lens, graph_key=GraphKey(rows))
    out = torch.empty_like(setup.q)
    made.plan(static)
    made.forward(case.spec, setup.q, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.forward(case.spec, setup.q, out)
    req_pool_indices.copy_(batch.req_pool_indices)
    seq_lens.copy_(batch.seq_lens)
    made.plan(static)
    graph.replay()
    assert_close(out, setup.reference())


def test_no_device_synchronisation(device: torch.device, generator: torch.Generator, compiled: bool) -> None:
    """Neither ``plan`` nor ``forward`` makes the host wait for the device."""
    if not compiled:
        pytest.skip("needs a CUDA device: on a CPU there is no device to wait for")
    setup = Setup(CASES["mixed"], torch.bfloat16, device, generator)
    made = backend(setup.case, device)
    setup.run(made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.plan(setup.batch)
        made.forward(setup.case.spec, setup.q, torch.empty_like(setup.q))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refuses_a_cpu_without_the_interpreter(device: torch.device) -> None:
    made = TritonAttention(Triton(), torch.device("cpu"))
    made.interpreted = False
    assert "attention=torch" in made.needs().refuse
    made.interpreted = True
    assert not made.needs().refuse
    assert torch.bfloat16 not in (made.needs().kv_dtypes or ())
