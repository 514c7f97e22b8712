"""The torch references of the kernels, which a CPU runs.

They are compared with transformers' modules, or with the definition computed in float64.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from minisgl.attention import QKNorm, rotate
from minisgl.kvcache.pool import KVPool
from minisgl.plugins.kernels.attention.references import norm_rope_store
from minisgl.plugins.kernels.ops.activation import gelu_and_mul, silu_and_mul
from minisgl.plugins.kernels.ops.norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance for one rounding to ``dtype``."""
    return 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


def hf_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute RMSNorm with transformers' module."""
    norm = Qwen3RMSNorm(len(weight), eps)
    norm.weight.data.copy_(weight)
    return norm(x).detach()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = 30 * torch.randn(7, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).float(), hf_norm(x, weight, 1e-5).float(), atol=1e-6, rtol=tolerance(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(7, 64).to(dtype), torch.randn(7, 64).to(dtype), torch.randn(64).to(dtype))
    total = x + residual
    normed, got = add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(got, total)
    want = hf_norm(total, weight, 1e-6)
    torch.testing.assert_close(normed.float(), want.float(), atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    x = torch.randn(5, 24).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    near = {"atol": tolerance(dtype), "rtol": tolerance(dtype)}
    kept = x.clone()
    torch.testing.assert_close(silu_and_mul(x).double(), F.silu(gate) * up, **near)
    torch.testing.assert_close(gelu_and_mul(x).double(), F.gelu(gate) * up, **near)
    tanh = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu_and_mul(x, approximate="tanh").double(), tanh, **near)
    assert torch.equal(x, kept)


def angles(tokens: int, head_dim: int) -> torch.Tensor:
    """Return random rotation angles [tokens, head_dim/2] in radians."""
    return torch.rand(tokens, head_dim // 2) * 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate(dtype: torch.dtype) -> None:
    x, angle = torch.randn(6, 3, 16).to(dtype), angles(6, 16)
    both = torch.cat((angle, angle), dim=-1)[None]
    heads_first = x.float().transpose(0, 1)[None]
    want, _ = apply_rotary_pos_emb(heads_first, heads_first, both.cos(), both.sin())
    got = rotate(x, torch.cat((angle.cos(), angle.sin()), dim=-1))
    assert got.dtype == dtype
    near = tolerance(dtype)
    torch.testing.assert_close(got.float(), want[0].transpose(0, 1), atol=near, rtol=near)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_norm_rope_store(normed: bool, layout: str) -> None:
    """The queries are returned; keys and values are in the pool, in both layouts, with and without QK-norm."""
    q_heads, kv_heads, dim, tokens = 4, 2, 16, 6
    qkv, angle = torch.randn(tokens, 8 * dim), angles(tokens, dim)
    norm = QKNorm(torch.randn(dim), torch.randn(dim), 1e-6) if normed else None
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
    pool = KVPool(2, 5, 4, kv_heads, dim, torch.float32, CPU, layout)  # type: ignore[arg-type]
    out_cache_loc = torch.randperm(20)[:tokens]
    kept = qkv.clone()
    got = norm_rope_store(qkv, q_heads, kv_heads, norm, cos_sin, pool, 1, out_cache_loc)
    q, k, v = (part.view(tokens, -1, dim) for part in kept.split([4 * dim, 2 * dim, 2 * dim], dim=-1))
    if norm is not None:
        q, k = hf_norm(q, norm.q, norm.eps), hf_norm(k, norm.k, norm.eps)
    torch.testing.assert_close(got, rotate(q, cos_sin), atol=1e-6, rtol=1e-6)
    keys, values = (buffer.reshape(20, kv_heads, dim)[out_cache_loc] for buffer in pool.layer(1))
    torch.testing.assert_close(keys, rotate(k, cos_sin), atol=1e-6, rtol=1e-6)
    assert torch.equal(values, v)
