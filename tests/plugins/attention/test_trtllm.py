"""Tests of attention=trtllm without a GPU: error messages and arguments of the kernel. tests/gpu tests the results."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.engine.setup import build_attention
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.hybrid import Hybrid
from minisgl.plugins.attention.trtllm import TrtllmBackend
from minisgl.testing.attention import AttentionCase, prepare_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DECODE = AttentionCase(((37, 1), (300, 1)), dtype=torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Pretend to have a Hopper GPU and FlashInfer. The list collects the arguments of the kernel's calls."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer"].__dict__["decode"] = sys.modules["flashinfer.decode"]
    sys.modules["flashinfer.decode"].__dict__["trtllm_batch_decode_with_kv_cache"] = lambda **kw: calls.append(kw)
    return calls


def test_refused_without_hybrid(hopper: list[dict[str, Any]]) -> None:
    """attention=trtllm alone is refused, and the options that the message suggests work."""
    manager = PluginManager.load()
    with pytest.raises(ConfigError) as error:
        build_attention(compose(manager, ["attention=trtllm"]), manager, CUDA, torch.bfloat16)
    assert "attention=trtllm computes decode rows only" in str(error.value)
    words = [word.rstrip(".") for word in str(error.value).split() if word.startswith("attention") and "=" in word]
    assert words[1:] == ["attention=hybrid", "attention.decode=trtllm", "attention.prefill=flashinfer"]
    config = compose(manager, words[1:])
    assert isinstance(config.attention, Hybrid)
    backend = build_attention(config, manager, CUDA, torch.bfloat16)
    assert backend.needs().graph and backend.needs().phases == {"decode", "extend"}


@pytest.mark.parametrize("page_size", [1, 8, 256])
def test_unsupported_page_sizes(page_size: int, hopper: list[dict[str, Any]]) -> None:
    """attention=trtllm refuses page sizes without a kernel, and lists the supported page sizes."""
    manager = PluginManager.load()
    words = ["attention=hybrid", "attention.decode=trtllm", f"page_size={page_size}"]
    with pytest.raises(ConfigError, match=f"page_size={page_size}: use page_size=16, 32, 64, 128"):
        build_attention(compose(manager, words), manager, CUDA, torch.bfloat16)


def test_refused_as_prefill_backend(hopper: list[dict[str, Any]]) -> None:
    """attention.prefill=trtllm is refused, because the kernels compute decode rows only."""
    manager = PluginManager.load()
    words = ["attention=hybrid", "attention.prefill=trtllm", "attention.decode=flashinfer"]
    with pytest.raises(ConfigError, match="the prefill backend does not compute extend rows"):
        build_attention(compose(manager, words), manager, CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (replace(DECODE, soft_cap=2.0), "do not support the soft cap"),
        (replace(DECODE, head_dim=72), "multiples of 16"),
        (replace(DECODE, head_dim=320), "up to 256"),
        (replace(DECODE, q_heads=40, kv_heads=1), "at most 32 query heads per KV head"),
    ],
    ids=str,
)
def test_unsupported_layers(case: AttentionCase, why: str) -> None:
    """`bind` raises a `ConfigError` for soft caps, head sizes and group sizes without a kernel."""
    prepared = prepare_case(case)
    with pytest.raises(ConfigError, match=why):
        TrtllmBackend(CPU, (9, 0)).bind(prepared.pool, prepared.layers, [])


def test_unsupported_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """attention=trtllm refuses CPUs and older GPUs, and names the command that installs a missing FlashInfer."""
    manager = PluginManager.load()
    with pytest.raises(ConfigError, match=r"need a CUDA device; attention=torch runs anywhere"):
        build_attention(compose(manager, ["attention=trtllm"]), manager, CPU, torch.bfloat16)
    assert "compute capability 8.0. Use attention=flashinfer" in TrtllmBackend(CUDA, (8, 0)).needs().refuse
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"needs the package 'flashinfer'.*pip install 'minisgl\[gpu\]'"):
        build_attention(compose(manager, ["attention=trtllm"]), manager, CUDA, torch.bfloat16)


def test_kernel_arguments(hopper: list[dict[str, Any]]) -> None:
    """attention=trtllm calls its kernel with page-table rows, lengths and window, and refuses prefill chunks."""
    prepared = prepare_case(replace(DECODE, window=10))
    backend = TrtllmBackend(CPU, (9, 0))
    backend.bind(prepared.pool, prepared.layers, [])
    backend.plan(prepared.batch)
    out = torch.empty_like(prepared.q)
    assert backend.forward(prepared.layers[1], prepared.q, out) is out
    (call,) = hopper
    assert call["out"] is out and call["query"] is prepared.q and call["kv_layout"] == "NHD"
    assert call["block_tables"].dtype == call["seq_lens"].dtype == torch.int32
    assert (
        call["block_tables"].tolist() == prepared.batch.page_table[prepared.batch.req_pool_indices.long(), :19].tolist()
    )
    assert call["seq_lens"].tolist() == [38, 301] and call["max_seq_len"] == 301
    assert call["window_left"] == 9  # the query's own position is the tenth
    assert not call["workspace_buffer"].any()  # it contains semaphores, which must start at zero
    prompts = prepare_case(replace(DECODE, rows=((0, 40),)))
    backend.bind(prompts.pool, prompts.layers, [])
    with pytest.raises(ValueError, match="computes decode rows only"):
        backend.plan(prompts.batch)
