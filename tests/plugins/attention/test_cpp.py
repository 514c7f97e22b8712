"""Tests of attention=cpp: the attention kit, random batches against attention=torch, and the compiled KV store.

The tests compile the C++ source; without a compiler they are skipped.
"""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention import QKNorm
from minisgl.config import ConfigError
from minisgl.kvcache.pool import KVPool
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention import slice_rows
from minisgl.plugins.attention.auto import Auto
from minisgl.plugins.attention.cpp import Cpp, CppAttention
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.plugins.kernels.attention.references import norm_rope_store
from minisgl.plugins.kernels.ops.cpp import attention as kernel
from minisgl.plugins.kernels.ops.cpp import load
from minisgl.plugins.speculation.ngram import Ngram
from minisgl.testing.attention import CASES, AttentionCase, AttentionConformance, prepare_case, run_case

CPU = torch.device("cpu")


def backend(max_query_tokens: int = 8) -> CppAttention:
    return CppAttention(TorchAttention(Torch(), CPU), CPU, max_query_tokens)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    """Skip the tests if there is no compiler here."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler, or no ninja")


class TestConformance(AttentionConformance):
    def make(self) -> CppAttention:
        return backend()


class TestConformanceOfLongRows(AttentionConformance):
    """All rows, prompts too, are computed in C++."""

    def make(self) -> CppAttention:
        return backend(max_query_tokens=1000)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("window", [-1, 1, 40, 700])
def test_long_rows_are_split(window: int, threads: int) -> None:
    """Rows of several splits, on more and fewer threads than items, equal dense attention."""
    lengths = (511, 512, 513, 1300, 0, 17)
    rows = (*((n, 1) for n in lengths), (1022, 4), (510, 5), (0, 3), (1500, 2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, want = run_case(backend(), AttentionCase(rows, page_size=16, window=window))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


row = st.tuples(st.integers(0, 600), st.integers(1, 10))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(row, min_size=1, max_size=6),
    page_size=st.sampled_from([1, 3, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (16, 1), (5, 5)]),
    head_dim=st.sampled_from([16, 32, 48, 64, 128, 256]),
    window=st.sampled_from([-1, -1, 1, 5, 100]),
    soft_cap=st.sampled_from([0.0, 0.0, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    max_query_tokens=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_random_batches(
    rows: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
    max_query_tokens: int,
    seed: int,
) -> None:
    """Random steps equal attention=torch, whichever rows the kernel computes. Unused pages contain NaN."""
    ordered = tuple(sorted(rows, key=lambda row: row[1] > 1))
    case = AttentionCase(ordered, page_size, *heads, head_dim, window, soft_cap, dtype)
    got, want = run_case(backend(max_query_tokens), case, seed=seed)
    reference, _ = run_case(TorchAttention(Torch(), CPU), case, seed=seed)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(got, reference, **near)
    torch.testing.assert_close(got, want, **near)


def test_promise_8_one_result_for_a_query() -> None:
    """The bits of a query's result depend neither on other rows, nor on threads, nor on its row's query tokens."""
    case = AttentionCase(((700, 1), (30, 1), (695, 6), (900, 3)), page_size=4)
    prepared = prepare_case(case)
    made = backend()
    made.bind(prepared.pool, prepared.layers, [])

    def result(first: int, last: int) -> torch.Tensor:
        batch = slice_rows(prepared.batch, first, last)
        begin, end = prepared.batch.cu_seqlens_q_cpu[[first, last]]
        made.plan(batch)
        return made.forward(prepared.layers[1], prepared.q[begin:end], torch.empty_like(prepared.q[begin:end]))

    together = result(0, 4)
    assert torch.equal(together, torch.cat([result(i, i + 1) for i in range(4)]))
    # The last query of row 2, alone: a decode row of the same length in the same pages.
    alone = replace(
        slice_rows(prepared.batch, 2, 3), num_decode=1, cu_seqlens_q_cpu=prepared.batch.cu_seqlens_q_cpu[:2]
    )
    made.plan(replace(alone, cu_seqlens_q=prepared.batch.cu_seqlens_q[:2]))
    q = prepared.q[7:8]
    assert torch.equal(made.forward(prepared.layers[1], q, torch.empty_like(q)), together[7:8])


def test_promise_8_prompts() -> None:
    """A query of a long prompt has the same bits as alone, in a decode row; heads are divided among threads or not."""
    case = AttentionCase(((0, 1100), (3, 40)), page_size=16, q_heads=4, kv_heads=2)
    prepared = prepare_case(case)
    made = backend(max_query_tokens=2000)
    made.bind(prepared.pool, prepared.layers, [])
    made.plan(prepared.batch)
    together = prepared.forward(made)
    torch.testing.assert_close(together, prepared.expected, atol=2e-6, rtol=2e-6)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            last = slice_rows(prepared.batch, 0, 1)  # the last query of the first row, as a decode row
            cu_seqlens_q = torch.tensor([0, 1], dtype=torch.int32)
            made.plan(replace(last, num_decode=1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_q_cpu=cu_seqlens_q.numpy()))
            q = prepared.q[1099:1100]
            assert torch.equal(made.forward(prepared.layers[1], q, torch.empty_like(q)), together[1099:1100])
            made.plan(prepared.batch)
            assert torch.equal(prepared.forward(made), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("avx2", [False, True])
def test_without_this_processors_instructions(avx2: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for any processor of this architecture, or without AVX-512, the kernel gives the same results.

    The width of its vectors, and so the size of its tiles, is 128, 256 or 512 bits.
    """
    if avx2 and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("AVX2 exists on x86-64 only")
    flags = ["-mno-avx512f"] if avx2 else []
    monkeypatch.setattr(kernel, "compiled", lambda: load("attention.cpp", native=avx2, flags=flags))
    near = 2e-6 if dtype == torch.float32 else 2e-2
    for head_dim in (64, 48):
        case = AttentionCase(((700, 1), (30, 1), (695, 6), (0, 50)), 16, 6, 2, head_dim, dtype=dtype)
        got, want = run_case(backend(max_query_tokens=100), case)
        torch.testing.assert_close(got, want, atol=near, rtol=near)


def test_padding_rows() -> None:
    """A row of length 0 attends to nothing; its result is 0, and other rows are not affected."""
    prepared = prepare_case(AttentionCase(((5, 1), (9, 1))))
    made = backend()
    made.bind(prepared.pool, prepared.layers, [])
    made.plan(replace(prepared.batch, seq_lens=torch.tensor([6, 0], dtype=torch.int32)))
    out = prepared.forward(made)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    torch.testing.assert_close(out[0], prepared.expected[0], atol=2e-6, rtol=2e-6)


def test_rows_are_divided() -> None:
    """Rows up to the first long one go to the kernel, the rest to the prefill backend."""
    made = backend(max_query_tokens=4)
    prepared = prepare_case(AttentionCase(((5, 1), (9, 4), (0, 5), (3, 2))))
    made.bind(prepared.pool, prepared.layers, [])
    made.plan(prepared.batch)
    assert made.few is not None and len(made.few.seq_lens_cpu) == 2 and made.tokens == 5 and made.has_prefill
    torch.testing.assert_close(prepared.forward(made), prepared.expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 900])
def test_norm_rope_store(normed: bool, dtype: torch.dtype, tokens: int) -> None:
    """QK-norm, RoPE and KV store in C++ equal the torch reference, for strided input too."""
    torch.manual_seed(tokens)
    q_heads, kv_heads, dim, page = 6, 2, 48, 4
    pools = [KVPool(2, 300, page, kv_heads, dim, dtype, CPU) for _ in range(2)]
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim + 8).to(dtype)[:, 8:]
    weights = [torch.rand(dim).to(dtype) + 0.5 for _ in range(2)]
    norm = QKNorm(weights[0], weights[1], 1e-5) if normed else None
    cos_sin, loc = torch.randn(tokens, dim), torch.randperm(300 * page)[:tokens].int()
    got = kernel.norm_rope_store(qkv, q_heads, kv_heads, norm, cos_sin, pools[0], 1, loc)
    want = norm_rope_store(qkv.contiguous(), q_heads, kv_heads, norm, cos_sin, pools[1], 1, loc)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-2, "rtol": 2e-2}
    torch.testing.assert_close(got, want, **near)
    for a, b in zip(pools[0].layer(1), pools[1].layer(1), strict=True):
        torch.testing.assert_close(a, b, **near)
    assert not any(half.any() for half in pools[0].layer(0))


def test_plugin_and_auto() -> None:
    """attention=auto selects attention=cpp on a CPU, for float32 and bfloat16."""
    manager = PluginManager.load()
    assert isinstance(manager.build("attention", manager.make("attention", "cpp"), device=CPU), CppAttention)
    for dtype in (torch.float32, torch.bfloat16):
        auto = manager.build("attention", Auto(), device=CPU)
        run_case(auto, replace(CASES[0], dtype=dtype))
        assert auto.chosen == "cpp"


def test_head_sizes() -> None:
    """A head size that is no multiple of 16 is refused by attention=cpp; attention=auto selects another backend."""
    case = replace(CASES[0], head_dim=24)
    with pytest.raises(ConfigError, match=r"head_dim is 24; .*multiple of 16.*attention=sparse"):
        run_case(backend(), case)
    auto = PluginManager.load().build("attention", Auto(), device=CPU)
    got, want = run_case(auto, case)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
    assert auto.chosen == "sparse"


def test_wrong_arguments_are_refused() -> None:
    """The compiled functions check dtypes, devices and contiguity."""
    prepared = prepare_case(replace(CASES[0], page_size=16))
    keys, values = prepared.pool.layer(1)
    out = torch.empty_like(prepared.q)
    for q, k, match in (
        (prepared.q.bfloat16(), keys, "another element type"),
        (prepared.q.double(), keys, "another element type"),
        (prepared.q.transpose(1, 2), keys, "q must be a contiguous CPU tensor of 3 dimensions"),
        (prepared.q, keys[:, ::2], "keys must be a contiguous CPU tensor of 4 dimensions"),
    ):
        with pytest.raises(ValueError, match=match):
            kernel.paged_attention(q, out, k, values, prepared.batch, prepared.layers[1])


def test_needs() -> None:
    """attention=cpp needs a CPU, float32 or bfloat16, and NHD pages."""
    assert backend().needs().kv_dtypes == (torch.float32, torch.bfloat16)
    assert backend().needs().refuse == ""
    on_gpu = CppAttention(TorchAttention(Torch(), CPU), torch.device("cuda"))
    assert "it runs on CPUs only" in on_gpu.needs().refuse
    with pytest.raises(ValueError, match=r"attention\.max_query_tokens=0 must be at least 1"):
        Cpp(max_query_tokens=0)


def test_rows_of_drafts() -> None:
    """By default, the C++ kernel computes the longest verification row of `ngram`: a token and its drafts."""
    assert Cpp().max_query_tokens >= 1 + Ngram().max_drafts


def test_without_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apache-tvm-ffi attention=cpp says what to install, and attention=auto selects another backend."""
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    kernel.compiled.cache_clear()
    try:
        assert "pip install 'minisgl[cpp]'" in backend().needs().refuse
        manager = PluginManager.load()
        for dtype, chosen in ((torch.float32, "sparse"), (torch.bfloat16, "torch")):
            auto = manager.build("attention", Auto(), device=CPU)
            assert not auto.needs().refuse
            run_case(auto, replace(CASES[0], dtype=dtype))
            assert auto.chosen == chosen
    finally:
        kernel.compiled.cache_clear()
