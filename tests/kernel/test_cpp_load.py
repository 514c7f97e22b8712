"""What the log says while kernels in C++ are compiled."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from minisgl.plugins.kernels.ops import cpp


def test_slow_compilation_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the compiler takes long, one line says so, and where the result is kept; the next library adds no line."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")

    def wait_for_the_line(*_: Any, **__: Any) -> str:
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        return "library"

    monkeypatch.setattr("tvm_ffi.cpp.load", wait_for_the_line)
    monkeypatch.setattr(cpp, "_find", lambda tool: tool)
    monkeypatch.setattr(cpp, "ANNOUNCE_SECONDS", 0.0)
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    cpp._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="minisgl.plugins.kernels.ops.cpp"):
        assert cpp.load("linear.cpp") == cpp.load("compare.cpp") == "library"
        time.sleep(0.05)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("compiling C++ kernels") and str(tmp_path) in line


def test_long_compilation_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader of the log learns that a compiler of minutes still runs."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")

    def wait_for_two_lines(*_: Any, **__: Any) -> str:
        deadline = time.monotonic() + 60
        while sum("still runs" in record.getMessage() for record in caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return "library"

    monkeypatch.setattr("tvm_ffi.cpp.load", wait_for_two_lines)
    monkeypatch.setattr(cpp, "_find", lambda tool: tool)
    monkeypatch.setattr(cpp, "ANNOUNCE_SECONDS", 0.0)
    monkeypatch.setattr(cpp, "REPEAT_SECONDS", 0.02)
    cpp._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="minisgl.plugins.kernels.ops.cpp"):
        assert cpp.load("linear.cpp") == "library"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("compiling C++ kernels")
    assert len([line for line in lines if "the compiler still runs" in line]) >= 2


def test_quick_load_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A library that loads at once is not announced, then or later."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed here")
    monkeypatch.setattr("tvm_ffi.cpp.load", lambda *_, **__: "library")
    monkeypatch.setattr(cpp, "_find", lambda tool: tool)
    monkeypatch.setattr(cpp, "ANNOUNCE_SECONDS", 1.0)
    cpp._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="minisgl.plugins.kernels.ops.cpp"):
        cpp.load("linear.cpp")
        time.sleep(1.2)
    assert not caplog.records
