"""attention=trtllm without a GPU: what is refused and what is said instead; tests/gpu has what it computes."""

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
from minisgl.testing.attention import AttentionCase, lay_out

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DECODE = AttentionCase(((37, 1), (300, 1)), dtype=torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A GPU and FlashInfer, as far as building asks for them; the list holds what its function was called with."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer"].__dict__["decode"] = sys.modules["flashinfer.decode"]
    sys.modules["flashinfer.decode"].__dict__["trtllm_batch_decode_with_kv_cache"] = lambda **kw: calls.append(kw)
    return calls


def test_alone_it_is_refused_with_the_words_that_work(hopper: list[dict[str, Any]]) -> None:
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
def test_pages_it_has_no_kernel_for_are_refused(page_size: int, hopper: list[dict[str, Any]]) -> None:
    manager = PluginManager.load()
    words = ["attention=hybrid", "attention.decode=trtllm", f"page_size={page_size}"]
    with pytest.raises(ConfigError, match=f"page_size={page_size}: use page_size=16, 32, 64, 128"):
        build_attention(compose(manager, words), manager, CUDA, torch.bfloat16)


def test_as_prefill_half_it_is_refused(hopper: list[dict[str, Any]]) -> None:
    manager = PluginManager.load()
    words = ["attention=hybrid", "attention.prefill=trtllm", "attention.decode=flashinfer"]
    with pytest.raises(ConfigError, match="the prefill backend does not compute extend rows"):
        build_attention(compose(manager, words), manager, CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (replace(DECODE, soft_cap=2.0), "no soft cap"),
        (replace(DECODE, head_dim=72), "head sizes that 16 divides"),
        (replace(DECODE, head_dim=320), "up to 256"),
        (replace(DECODE, q_heads=40, kv_heads=1), "at most 32 query heads"),
    ],
    ids=str,
)
def test_layers_it_can_not_compute_are_refused(case: AttentionCase, why: str) -> None:
    laid = lay_out(case)
    with pytest.raises(ConfigError, match=why):
        TrtllmBackend(CPU, (9, 0)).bind(laid.pool, laid.layers, [])


def test_other_devices_are_refused_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager.load()
    with pytest.raises(ConfigError, match=r"need a CUDA device; attention=torch runs anywhere"):
        build_attention(compose(manager, ["attention=trtllm"]), manager, CPU, torch.bfloat16)
    assert "compute capability 8.0. Use attention=flashinfer" in TrtllmBackend(CUDA, (8, 0)).needs().refuse
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"needs the package 'flashinfer'.*pip install 'minisgl\[gpu\]'"):
        build_attention(compose(manager, ["attention=trtllm"]), manager, CUDA, torch.bfloat16)


def test_it_hands_over_rows_pages_and_lengths(hopper: list[dict[str, Any]]) -> None:
    laid = lay_out(replace(DECODE, window=10))
    backend = TrtllmBackend(CPU, (9, 0))
    backend.bind(laid.pool, laid.layers, [])
    backend.plan(laid.batch)
    out = torch.empty_like(laid.q)
    assert backend.forward(laid.layers[1], laid.q, out) is out
    (call,) = hopper
    assert call["out"] is out and call["query"] is laid.q and call["kv_layout"] == "NHD"
    assert call["block_tables"].dtype == call["seq_lens"].dtype == torch.int32
    assert call["block_tables"].tolist() == laid.batch.page_table[laid.batch.req_pool_indices.long(), :19].tolist()
    assert call["seq_lens"].tolist() == [38, 301] and call["max_seq_len"] == 301
    assert call["window_left"] == 9  # the query's own position is the tenth
    assert not call["workspace_buffer"].any()  # semaphores in it start at zero
    prompts = lay_out(replace(DECODE, rows=((0, 40),)))
    backend.bind(prompts.pool, prompts.layers, [])
    with pytest.raises(ValueError, match="attention=hybrid gives prefill to another"):
        backend.plan(prompts.batch)
