"""The comparison of token ids, on both of its roads; the one in C++ is compiled here."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import ConfigError
from minisgl.core import I64
from minisgl.kernel import compare, cpp
from minisgl.kernel.compare import CommonPages, common_pages, pick_common_pages
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.cache.radix import Radix, RadixCache


@pytest.fixture(scope="module")
def compiled() -> CommonPages:
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler, or no ninja")
    return pick_common_pages("cpp")


def counted(a: I64, b: I64, page_size: int) -> int:
    """As a reader would count."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same // page_size


@settings(deadline=None, max_examples=200)
@given(length=st.integers(0, 400), other=st.integers(0, 400), at=st.integers(0, 400), page_size=st.integers(1, 64))
def test_both_roads_count_the_pages_in_common(
    compiled: CommonPages, length: int, other: int, at: int, page_size: int
) -> None:
    rng = np.random.default_rng(length)
    a = rng.integers(0, 1 << 40, length)
    b = np.concatenate([a, rng.integers(0, 1 << 40, 400)])[:other]
    if at < other:
        b[at] ^= 1 << int(rng.integers(0, 40))  # one bit, high or low
    want = counted(a, b, page_size)
    assert common_pages(a, b, page_size) == want
    assert compiled(a, b, page_size) == want


def test_slices_and_arrays_that_are_read_only(compiled: CommonPages) -> None:
    ids = np.arange(1000)
    frozen = np.frombuffer(ids.tobytes(), np.int64)
    for a, b in ((ids[7:], ids[7:900].copy()), (frozen, ids), (ids, frozen), (frozen[5:], frozen[5:])):
        assert compiled(a, b, 16) == counted(a, b, 16)


def test_what_is_not_a_row_of_int64_is_refused() -> None:
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    raw = cpp.load("compare.cpp").common_pages
    ids = np.arange(64)
    for wrong in (ids.astype(np.int32), ids[::2], ids.reshape(8, 8), ids.astype(np.float64)):
        with pytest.raises(ValueError, match="one contiguous row of int64"):
            raw(wrong, ids, 1)


def test_a_radix_cache_gives_the_same_answers_on_both_roads(compiled: CommonPages) -> None:
    manager = PluginManager.load()
    caches = [manager.build("cache", Radix(compare=road), page_size=4) for road in ("numpy", "cpp")]
    assert caches[0].common_pages is common_pages
    assert caches[1].common_pages is not common_pages
    rng = np.random.default_rng(3)
    answers: list[list[Any]] = [[], []]
    for step in range(60):
        ids = rng.integers(0, 2, 4 * int(rng.integers(1, 12)))
        for cache, seen in zip(caches, answers, strict=True):
            key = compare_key(ids)
            seen.append(cache.match(key).pages.tolist())
            cache.insert(None, key, 0, np.arange(100 * step, 100 * step + len(ids) // 4, dtype=np.int32))
            cache.check()
    assert answers[0] == answers[1]
    assert any(answers[0])


def compare_key(ids: I64) -> Any:
    from minisgl.kvcache import Key

    return Key(None, ids)


def test_without_the_package_auto_is_numpy_and_cpp_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    assert pick_common_pages("auto") is common_pages
    with pytest.raises(ConfigError, match=r"compare\.cpp .*apache-tvm-ffi.* pip install 'minisgl\[cpp\]'"):
        pick_common_pages("cpp")


def test_without_a_compiler_auto_is_numpy_and_cpp_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert pick_common_pages("auto") is common_pages
    with pytest.raises(ConfigError, match="no-such-compiler, which is needed to compile it, is not on the path"):
        pick_common_pages("cpp")


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, compiled: CommonPages
) -> None:
    (tmp_path / "compare.cpp").write_text("int broken( {\n")
    monkeypatch.setattr(cpp, "HERE", tmp_path)
    assert pick_common_pages("auto") is common_pages
    with pytest.raises(ConfigError, match=r"(?s)compare\.cpp could not be compiled here.*error"):
        pick_common_pages("cpp")


def test_an_unknown_road_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compare=rust is unknown: use auto, numpy, cpp\."):
        pick_common_pages("rust")
    assert set(compare.ROADS) == {"auto", "numpy", "cpp"}
    assert RadixCache(4).common_pages is common_pages
