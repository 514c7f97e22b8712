"""The kernels of a decoder layer for a few decode rows, compared with their torch references in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from torch import Tensor

from minisgl.attention import QKNorm
from minisgl.kvcache.pool import KVPool
from minisgl.plugins.kernels.attention import references
from minisgl.plugins.kernels.ops import activation
from minisgl.plugins.kernels.ops import decode_layer as reference
from minisgl.plugins.kernels.ops.triton import attention as triton_attention
from minisgl.plugins.kernels.ops.triton import decode_layer as kernels
from minisgl.plugins.kernels.ops.triton import projected_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture
def random(dtype: torch.dtype, device: torch.device, generator: torch.Generator):  # type: ignore[no-untyped-def]
    """Return a function that returns new random tensors of the test's dtype."""
    return lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Check each element's error relative to its magnitude, or to 1 if its magnitude is smaller. NaN fails."""
    assert out.shape == expected.shape
    error = (out.cpu().double() - expected.cpu().double()).abs() / expected.cpu().double().abs().clamp(min=1.0)
    assert error.max().item() < TOLERANCE[out.dtype]


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return copies in float64 on the CPU."""
    return [None if t is None else t.cpu().double() for t in tensors]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("out", "inner", "normed", "biased", "added"),
    [
        (64, 256, False, False, False),
        (32, 264, True, False, False),
        (96, 96, False, False, True),
        (4096, 1024, True, False, False),
        (1024, 3072, False, False, True),
        (2112, 512, True, True, True),
        (64, 4096, True, True, True),
        (5120, 2048, True, False, False),
        (128, 2048, True, False, False),
        (256, 512, False, False, True),
    ],
)
def test_projection(out, inner, normed, biased, added, rows, random, compiled) -> None:  # type: ignore[no-untyped-def]
    """Shapes include fewer columns than a warp loads at once, and more than the registers hold."""
    if not compiled and (out > 128 or rows not in ((3,) if inner > 1000 else (1, 3))):
        pytest.skip("too slow for the interpreter")
    x, weight = random(rows, 2 * inner)[:, :inner], random(out, inner) / inner**0.5
    bias, norm = random(out) if biased else None, random(inner) if normed else None
    residual = random(rows, out) if added else None
    assert kernels.serves(x.dtype, weight) == (out % 64 == 0)
    y = kernels.projection(x, weight, bias, norm, 1e-6, residual)
    x, weight, bias, norm, residual = wide(x, weight, bias, norm, residual)
    assert_close(y, reference.projection_torch(x, weight, bias, norm, 1e-6, residual))


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("dim", "inner", "biased"), [(32, 256, False), (64, 520, True), (3072, 1024, False)])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gated_projection(  # type: ignore[no-untyped-def]
    act: activation.Act, dim, inner, biased, rows, random, compiled
) -> None:
    if not compiled and (dim > 64 or rows not in ((1, 5) if act == "silu" else (2,)) or biased == (act == "silu")):
        pytest.skip("too slow for the interpreter")
    x, weight, norm = random(rows, inner), random(2 * dim, inner) / inner**0.5, random(inner)
    bias = random(2 * dim) if biased else None
    y = kernels.projection(x, weight, bias, norm, 1e-5, act=act)
    x, weight, bias, norm = wide(x, weight, bias, norm)
    assert_close(y, reference.projection_torch(x, weight, bias, norm, 1e-5, act=act))


@pytest.mark.parametrize("normed", [True, False], ids=["QK-norm", "no norm"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "page_size", "window", "splits"),
    [
        (4, 2, 64, 16, -1, 4),
        (16, 8, 128, 16, -1, 128),
        (1, 1, 16, 1, -1, 1),
        (4, 2, 32, 5, 50, 2),
        (5, 1, 16, 1, -1, 1),
        (4, 1, 32, 5, 50, 2),
        (32, 4, 128, 64, -1, 64),
        (40, 8, 128, 16, -1, 64),
    ],
)
def test_attention(  # type: ignore[no-untyped-def]
    q_heads, kv_heads, head_dim, page_size, window, splits, layout, normed, random, compiled, generator, device
) -> None:
    """Rows of one token, of whole blocks, and of a block and a token; memory past a row's tokens holds NaN.

    The first three cases have at most two query heads per KV head, the others more: a kernel each.
    """
    if not compiled and (head_dim * q_heads > 256 or normed == (layout == "HND")):
        pytest.skip("too slow for the interpreter")
    lengths = [1, 64, 65, 200, 1300] if compiled else [1, 16, 17, 75]
    rows, columns = len(lengths), -(-max(lengths) // page_size)
    qkv = random(rows, (q_heads + 2 * kv_heads) * head_dim)
    dtype = qkv.dtype
    norm = QKNorm(random(head_dim), random(head_dim), 1e-6) if normed else None
    angles = torch.rand(rows, head_dim // 2, generator=generator, device=device) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    table = torch.randperm(rows * columns, generator=generator, device=device).int().view(rows, columns)
    req_pool_indices = torch.randperm(rows, generator=generator, device=device).int()
    mine = table[req_pool_indices.long()].cpu()
    locations = []
    for row, length in enumerate(lengths):
        position = torch.arange(length)
        locations.append(mine[row, position // page_size].long() * page_size + position % page_size)
    out_cache_loc = torch.tensor([int(where[-1]) for where in locations], device=device)
    pool = KVPool(2, rows * columns, page_size, kv_heads, head_dim, dtype, device, layout)
    there = KVPool(2, rows * columns, page_size, kv_heads, head_dim, torch.float64, torch.device("cpu"))
    for here, wide_kv in zip(pool.layer(1), there.layer(1), strict=True):
        here.fill_(float("nan"))
        for where in locations:
            kv = random(len(where) - 1, kv_heads, head_dim)
            page, offset = where[:-1] // page_size, where[:-1] % page_size
            here[page.to(device), offset.to(device)] = kv
            wide_kv[page, offset] = kv.cpu().double()
    heads = triton_attention.Heads(q_heads, kv_heads, head_dim, head_dim**-0.5, window, 0.0)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages = triton_attention.Pages(*pool.layer(1), table, req_pool_indices, seq_lens)
    partial = torch.full((rows * q_heads * splits * (head_dim + 1),), float("nan"), device=device)
    out = torch.full((rows, q_heads, head_dim), float("nan"), device=device, dtype=dtype)
    projected_attention.attention(qkv, norm, cos_sin, out_cache_loc, pages, heads, splits, partial, out)

    seen = [where[-window:] if window >= 0 else where for where in locations]
    wide_norm = None if norm is None else QKNorm(norm.q.cpu().double(), norm.k.cpu().double(), norm.eps)
    expected = references.attention(
        qkv.cpu().double(),
        q_heads,
        kv_heads,
        wide_norm,
        cos_sin.cpu(),
        there,
        1,
        out_cache_loc.cpu(),
        seen,
        heads.scale,
    )
    assert_close(out, expected)
    for here, wide_kv in zip(pool.layer(1), there.layer(1), strict=True):
        for where in locations:
            page, offset = where // page_size, where % page_size
            assert_close(here[page.to(device), offset.to(device)], wide_kv[page, offset])


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "inner"),
    [(1, 8, 2, 256, 32), (3, 6, 3, 264, 40), (1, 128, 8, 2048, 768), (4, 128, 8, 2048, 768)],
)
def test_experts(rows, count, top_k, hidden, inner, renormalize, random, compiled, generator) -> None:  # type: ignore[no-untyped-def]
    if not compiled and count > 8:
        pytest.skip("too slow for the interpreter")
    x, norm = random(rows, hidden), random(hidden)
    order = [torch.randperm(count, generator=generator, device=x.device) for _ in range(rows)]
    logits = (torch.stack(order) / 16).to(x.dtype)  # no two are equal
    gate_up, down = random(count, 2 * inner, hidden) / hidden**0.5, random(count, hidden, inner) / inner**0.5
    y = kernels.experts(x, norm, 1e-6, logits, gate_up, down, top_k, renormalize, "silu")
    x, norm, logits, gate_up, down = wide(x, norm, logits, gate_up, down)
    assert_close(y, reference.experts_torch(x, norm, 1e-6, logits, gate_up, down, top_k, renormalize, "silu"))


def test_experts_with_equal_logits(device: torch.device) -> None:
    """Among equal logits, the experts with the smaller numbers are chosen, also among more than one tile has."""
    count, top_k = 72, 3
    x, norm = torch.randn(1, 256, device=device), torch.ones(256, device=device)
    gate_up, down = torch.randn(count, 64, 256, device=device) / 16, torch.randn(count, 256, 32, device=device) / 6
    equal = torch.zeros(1, count, device=device)
    only_the_first = equal.masked_fill(torch.arange(count, device=device) >= top_k, float("-inf"))
    y = kernels.experts(x, norm, 1e-6, equal, gate_up, down, top_k, True, "silu")
    given = wide(x, norm, only_the_first, gate_up, down)
    assert_close(y, reference.experts_torch(*given[:2], 1e-6, *given[2:], top_k, True, "silu"))


def test_experts_of_nan(device: torch.device) -> None:
    """Logits that are not numbers give a result that is not a number, and no access outside the experts' weights."""
    x, norm = torch.randn(1, 256, device=device), torch.ones(256, device=device)
    gate_up, down = torch.randn(4, 64, 256, device=device), torch.randn(4, 256, 32, device=device)
    y = kernels.experts(x, norm, 1e-6, torch.full((1, 4), float("nan"), device=device), gate_up, down, 2, True, "silu")
    assert y.isnan().all()
