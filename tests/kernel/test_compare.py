"""The comparison of token ids in numpy and in C++.

The C++ version is compiled by the tests; without a compiler these tests are skipped.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import ConfigError
from minisgl.core import I32
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.cache import compare
from minisgl.plugins.cache.compare import CommonPages, common_pages, common_pages_in_cpp, pick_common_pages
from minisgl.plugins.cache.radix import Radix, RadixCache
from minisgl.plugins.kernels.ops import cpp


@pytest.fixture(scope="module")
def compiled() -> CommonPages:
    """Return the C++ version, or skip the test if it can't be compiled here."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler, or no ninja")
    return pick_common_pages("cpp")


def expected_pages(a: I32, b: I32, page_size: int) -> int:
    """Count the common pages in plain Python: the expected value."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same // page_size


@settings(deadline=None, max_examples=200)
@given(length=st.integers(0, 400), other=st.integers(0, 400), at=st.integers(0, 400), page_size=st.integers(1, 64))
def test_both_count_common_pages(compiled: CommonPages, length: int, other: int, at: int, page_size: int) -> None:
    """Both count the pages before the first different id, or of the shorter sequence."""
    rng = np.random.default_rng(length)
    a = rng.integers(0, 1 << 31, length, np.int32)
    b = np.concatenate([a, rng.integers(0, 1 << 31, 400, np.int32)])[:other]
    if at < other:
        b[at] ^= 1 << int(rng.integers(0, 31))  # flip one bit, high or low
    want = expected_pages(a, b, page_size)
    assert common_pages(a, b, page_size) == want
    assert compiled(a, b, page_size) == want


def test_slices_and_read_only_arrays(compiled: CommonPages) -> None:
    """The C++ version also handles slices and read-only arrays, which it passes on to numpy."""
    ids = np.arange(1000, dtype=np.int32)
    frozen = np.frombuffer(ids.tobytes(), np.int32)
    for a, b in ((ids[7:], ids[7:900].copy()), (frozen, ids), (ids, frozen), (frozen[5:], frozen[5:])):
        assert compiled(a, b, 16) == expected_pages(a, b, 16)


def test_wrong_arrays_are_refused() -> None:
    """The compiled function accepts contiguous one-dimensional int32 arrays only."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    raw = cpp.load("compare.cpp").common_pages
    ids = np.arange(64, dtype=np.int32)
    for wrong in (ids.astype(np.int64), ids[::2], ids.reshape(8, 8), ids.astype(np.float64)):
        with pytest.raises(ValueError, match="one contiguous row of int32"):
            raw(wrong, ids, 1)


def test_radix_cache_is_the_same_with_both(compiled: CommonPages) -> None:
    """Random insertions and lookups give the same pages with ``compare=numpy`` and ``compare=cpp``."""
    manager = PluginManager.load()
    caches = [manager.build("cache", Radix(compare=algorithm), page_size=4) for algorithm in ("numpy", "cpp")]
    assert caches[0].common_pages is common_pages
    assert caches[1].common_pages is not common_pages
    rng = np.random.default_rng(3)
    answers: list[list[Any]] = [[], []]
    for step in range(60):
        ids = rng.integers(0, 2, 4 * int(rng.integers(1, 12)), np.int32)
        for cache, seen in zip(caches, answers, strict=True):
            key = key_of(ids)
            seen.append(cache.match(key).pages.tolist())
            cache.insert(None, key, 0, np.arange(100 * step, 100 * step + len(ids) // 4, dtype=np.int32))
            cache.check()
    assert answers[0] == answers[1]
    assert any(answers[0])


def key_of(ids: I32) -> Any:
    from minisgl.plugins.cache.base import Key

    return Key(None, ids)


@pytest.fixture
def not_loaded() -> Iterator[None]:
    """Forget the loaded library before and after the test: a process loads it once."""
    common_pages_in_cpp.cache_clear()
    yield
    common_pages_in_cpp.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_library_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cache loads nothing: loading takes tens of milliseconds, because it asks ninja."""
    first = pick_common_pages("cpp")
    monkeypatch.setattr(cpp, "load", lambda name: pytest.fail(f"{name} was loaded again"))
    assert pick_common_pages("cpp") is pick_common_pages("auto") is first


@pytest.mark.usefixtures("not_loaded")
def test_without_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apache-tvm-ffi ``auto`` is numpy, and the error of ``cpp`` says what to install."""
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    assert pick_common_pages("auto") is common_pages
    with pytest.raises(ConfigError, match=r"compare\.cpp .*apache-tvm-ffi.* pip install 'minisgl\[cpp\]'"):
        pick_common_pages("cpp")


@pytest.mark.usefixtures("not_loaded")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler ``auto`` is numpy, and the error of ``cpp`` names the compiler."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert pick_common_pages("auto") is common_pages
    with pytest.raises(ConfigError, match="no-such-compiler, which is needed to compile it, is not on PATH"):
        pick_common_pages("cpp")


@pytest.mark.usefixtures("compiled", "not_loaded")
def test_compilation_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the source does not compile, ``auto`` is numpy, and the error of ``cpp`` quotes the compiler."""
    (tmp_path / "compare.cpp").write_text("int broken( {\n")
    monkeypatch.setattr(cpp, "HERE", tmp_path)
    assert pick_common_pages("auto") is common_pages
    with pytest.raises(ConfigError, match=r"(?s)compare\.cpp could not be compiled here.*error"):
        pick_common_pages("cpp")


def test_unknown_algorithm_is_refused() -> None:
    """The error lists the algorithms; a cache without options uses numpy."""
    with pytest.raises(ConfigError, match=r"compare=rust is unknown: use auto, numpy, cpp\."):
        pick_common_pages("rust")
    assert set(compare.ALGORITHMS) == {"auto", "numpy", "cpp"}
    assert RadixCache(4).common_pages is common_pages
