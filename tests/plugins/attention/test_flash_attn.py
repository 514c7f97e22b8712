"""Tests of attention=flash_attn without a GPU: choice of the package, error messages, and calls of each package.

The packages are replaced by stand-ins with the parameters of the real functions. They compute in plain torch what the
real functions document.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention import GraphKey
from minisgl.config import ConfigError
from minisgl.engine.setup import build_attention
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention import flash_attn
from minisgl.plugins.attention.flash_attn import RELEASES, FlashAttention, choose
from minisgl.plugins.kernels.attention.page_table_rows import PageTableRows
from minisgl.testing.attention import AttentionCase, prepare_case, run_case

CPU = torch.device("cpu")
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
MIXED = AttentionCase(((37, 1), (0, 1), (300, 1), (0, 40), (21, 19), (260, 3)), dtype=torch.float16)
CASES = (
    MIXED,
    replace(MIXED, rows=MIXED.rows[:3], window=10),
    replace(MIXED, rows=MIXED.rows[3:], q_heads=6, kv_heads=3),
    replace(MIXED, window=10),
    replace(MIXED, soft_cap=2.0),
)


def paged(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    cap: float,
) -> torch.Tensor:
    """Compute attention as the packages do: queries are at the end of their row's keys; (-1, -1) is no window."""
    flat = q.flatten(0, 1) if cu_seqlens_q is None else q
    ends = range(0, len(flat) + 1, q.shape[1]) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    out = torch.empty_like(flat)
    for row, (a, b) in enumerate(itertools.pairwise(ends)):
        length = int(seq_lens[row])
        used = page_table[row, : -(-length // pages[0].shape[1])].long()
        k, v = (x[used].flatten(0, 1)[:length].double() for x in pages)
        k, v = (x.repeat_interleave(q.shape[-2] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("nhd,lhd->hnl", flat[a:b].double(), k) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        query, key = torch.arange(length - (b - a), length)[:, None], torch.arange(length)
        hidden = (key > query) & (causal or window[1] == 0)
        hidden |= (key < query - window[0]) & (window[0] >= 0)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[a:b] = torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)
    return out.view(q.shape)


def package_4() -> dict[str, Any]:
    """Return the stand-in modules of FlashAttention 4: module name to functions."""

    def _flash_attn_fwd(
        q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_k, page_table, softmax_scale, causal, softcap,
        window_size_left, window_size_right, num_splits, out,
    ) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
        assert {t.dtype for t in (seqused_k, page_table)} == {torch.int32}
        assert num_splits == 1 and max_seqlen_k >= int(seqused_k.max()) and softcap != 0.0
        window = (-1, -1) if window_size_left is None else (window_size_left, window_size_right)
        options = (softmax_scale, causal, window, softcap or 0.0)
        out.copy_(paged(q, (k, v), page_table, seqused_k, cu_seqlens_q, *options))

    return {"flash_attn": {}, "flash_attn.cute": {}, "flash_attn.cute.interface": {"_flash_attn_fwd": _flash_attn_fwd}}


def package_3() -> dict[str, Any]:
    """Return the stand-in modules of FlashAttention 3: module name to functions."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
        window_size, softcap, num_splits,
    ) -> torch.Tensor:  # type: ignore[no-untyped-def]  # fmt: skip
        assert {t.dtype for t in (cache_seqlens, page_table)} == {torch.int32}
        assert max_seqlen_q == (1 if cu_seqlens_q is None else int(cu_seqlens_q.diff().max()))
        options = (softmax_scale, causal, window_size, softcap)
        return paged(q, (k_cache, v_cache), page_table, cache_seqlens, cu_seqlens_q, *options)

    return {"flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_with_kvcache}}


def package_2() -> dict[str, Any]:
    """Return the stand-in modules of FlashAttention 2: module name to functions."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap, num_splits
    ) -> torch.Tensor:  # type: ignore[no-untyped-def]
        options = (softmax_scale, causal, window_size, softcap)
        return paged(q, (k_cache, v_cache), block_table, cache_seqlens, None, *options)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, block_table, softmax_scale, causal,
        window_size, softcap,
    ) -> torch.Tensor:  # type: ignore[no-untyped-def]  # fmt: skip
        assert {t.dtype for t in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        options = (softmax_scale, causal, window_size, softcap)
        return paged(q, (k, v), block_table, cu_seqlens_k.diff(), cu_seqlens_q, *options)

    functions = {"flash_attn_with_kvcache": flash_attn_with_kvcache, "flash_attn_varlen_func": flash_attn_varlen_func}
    return {"flash_attn_2_cuda": {}, "flash_attn": functions}


STAND_INS: dict[int, Callable[[], dict[str, Any]]] = {4: package_4, 3: package_3, 2: package_2}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs stand-ins for some versions into sys.modules and hides the other versions."""

    def put(*versions: int) -> None:
        names = [name for package in STAND_INS.values() for name in package()]
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        packages = {name: functions for v in versions for name, functions in STAND_INS[v]().items()}
        for name, functions in packages.items():
            module = ModuleType(name)
            module.__dict__.update(functions)
            monkeypatch.setitem(sys.modules, name, module)
        modules = {RELEASES[v].module for v in versions}
        monkeypatch.setattr(flash_attn, "installed", lambda v: RELEASES[v].module in modules)

    return put


# ---- computing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("version", RELEASES)
def test_equals_dense_attention(version: int, case: AttentionCase, install: Callable[..., None]) -> None:
    """Each version of FlashAttention is called with arguments for which its function computes dense attention."""
    install(version)
    backend = FlashAttention(CPU, version, flash_attn.KERNELS[version]())
    for page_size in RELEASES[version].page_sizes or (1, 16, 64):
        got, want = run_case(backend, replace(case, page_size=page_size))
        torch.testing.assert_close(got, want, atol=4e-3, rtol=4e-3)


def test_bucket_has_static_page_table(install: Callable[..., None]) -> None:
    """In a graph bucket, the page table has the same memory in each plan, and the length bound holds for any step."""
    install(4)
    backend = FlashAttention(CPU, 4, flash_attn.KERNELS[4]())
    prepared = prepare_case(replace(MIXED, rows=((37, 1), (300, 1), (5, 1))))
    backend.bind(prepared.pool, prepared.layers, [GraphKey(3), GraphKey(8)])
    padding = replace(
        prepared.batch,
        seq_lens_cpu=np.ones(3, np.int32),
        req_pool_indices=torch.full((3,), 5, dtype=torch.int32),
        graph_key=GraphKey(3),
    )
    backend.plan(padding)
    recorded = backend._decode
    assert recorded is not None and recorded.cu_seqlens_q is None
    assert recorded.max_seqlen_k == prepared.batch.page_table.shape[1] * 16  # not the length of the padding rows
    backend.plan(replace(prepared.batch, graph_key=GraphKey(3)))
    assert backend._decode is not None
    assert backend._decode.page_table.data_ptr() == recorded.page_table.data_ptr()
    assert backend._decode.page_table.shape == recorded.page_table.shape
    torch.testing.assert_close(prepared.forward(backend), prepared.expected, atol=4e-3, rtol=4e-3)


def test_num_splits(install: Callable[..., None]) -> None:
    """For version 4 the number of KV splits is derived from rows, KV heads, length bound and multiprocessors."""
    backend = FlashAttention(CPU, 4, None)
    prepared = prepare_case(MIXED)
    backend.bind(prepared.pool, prepared.layers, [])
    assert backend._num_splits(1, 16384) == 1  # version 4's kernel can't split KV on Hopper
    backend._num_sms = 148
    assert backend._num_splits(1, 16384) == 74  # two KV heads
    assert backend._num_splits(1, 300) == 3  # not more splits than tiles of 128 keys
    assert backend._num_splits(256, 16384) == 1
    assert FlashAttention(CPU, 3, None)._num_splits(1, 16384) == 0


def test_page_table_rows() -> None:
    """The page table from `PageTableRows.gather` has as many columns as the longest row has pages."""
    prepared = prepare_case(MIXED)
    page_table_rows = PageTableRows(16, [])
    assert page_table_rows.gather(prepared.batch, 0, 2).shape == (2, 3)
    assert page_table_rows.gather(prepared.batch, 0, 3).shape == (3, 19)
    assert page_table_rows.max_seq_len(prepared.batch, 3, 6) == 263
    gathered = page_table_rows.gather(prepared.batch, 2, 3)[0]
    assert torch.equal(gathered, prepared.batch.page_table[prepared.batch.req_pool_indices[2], :19])


# ---- choosing and refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "requested", "capability", "version"),
    [
        ((4, 3, 2), None, HOPPER, 4),
        ((3, 2), None, HOPPER, 3),
        ((2,), None, HOPPER, 2),
        ((4, 3, 2), None, AMPERE, 2),
        ((4, 3, 2), 3, HOPPER, 3),
        ((4, 2), 2, (10, 0), 2),
        ((4,), None, (10, 3), 4),
    ],
)
def test_choose(
    available: tuple[int, ...],
    requested: int | None,
    capability: tuple[int, int],
    version: int,
    install: Callable[..., None],
) -> None:
    """Without a requested version, `choose` selects the newest installed FlashAttention that runs on the GPU."""
    install(*available)
    assert choose(requested, capability) == (version, "")


@pytest.mark.parametrize(
    ("available", "requested", "capability", "words"),
    [
        ((), None, HOPPER, ("no FlashAttention is installed", "pip install 'minisgl[gpu]'")),
        ((), None, AMPERE, ("no FlashAttention is installed", "pip install flash-attn")),
        ((4,), 3, HOPPER, ("FlashAttention 3 is not installed", "hopper/")),
        ((4, 2), 4, AMPERE, ("reads KV pages only on Hopper and Blackwell", "8.0", "attention=triton")),
        ((4,), None, AMPERE, ("FlashAttention 4 reads KV pages only on Hopper", "8.0")),
        ((2,), None, TURING, ("reads KV pages only on Ampere and later", "7.5")),
    ],
)
def test_choose_refuses(
    available: tuple[int, ...],
    requested: int | None,
    capability: tuple[int, int],
    words: tuple[str, ...],
    install: Callable[..., None],
) -> None:
    """If no FlashAttention can run, `choose` says which package is missing or which GPUs the package needs."""
    install(*available)
    _, refuse = choose(requested, capability)
    assert all(word in refuse for word in words), refuse


def test_installed_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`installed` finds a package without importing its module."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "flash_attn_2_cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    assert [v for v in RELEASES if flash_attn.installed(v)] == []
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)  # like flash-attn-4: flash_attn has no __init__.py
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name)
    assert [v for v in RELEASES if flash_attn.installed(v)] == [4]
    monkeypatch.delitem(sys.modules, "flash_attn")


def test_version_2_refuses_small_pages(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With FlashAttention 2, building the backend fails for page sizes other than 256, 512 and 1024."""
    install(2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    manager, cuda = PluginManager.load(), torch.device("cuda")
    with pytest.raises(ConfigError, match="can't serve page_size=16: use page_size=256, 512, 1024"):
        build_attention(compose(manager, ["attention=flash_attn"]), manager, cuda, torch.bfloat16)
    words = ["attention=flash_attn", "page_size=256"]
    backend = build_attention(compose(manager, words), manager, cuda, torch.bfloat16)
    assert isinstance(backend, FlashAttention) and backend.version == 2
    with pytest.raises(ConfigError, match="can't serve dtype=float32: use dtype=bfloat16, float16"):
        build_attention(compose(manager, words), manager, cuda, torch.float32)


def test_refuses_devices_versions_and_head_sizes() -> None:
    """attention=flash_attn raises a `ConfigError` on a CPU, for an unknown version and for an unsupported head size."""
    manager = PluginManager.load()
    with pytest.raises(ConfigError, match=r"needs a CUDA device; attention=torch runs anywhere"):
        build_attention(compose(manager, ["attention=flash_attn"]), manager, CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"attention.version=5 is unknown: use 4, 3 or 2"):
        compose(manager, ["attention=flash_attn", "attention.version=5"])
    prepared = prepare_case(replace(MIXED, head_dim=80))
    with pytest.raises(ConfigError, match="supports head sizes 32, 64, 128, 256, but this model has 80"):
        FlashAttention(CPU, 4, None).bind(prepared.pool, prepared.layers, [])
