"""The processes that compile kernels start early only where an engine needs them, and end whatever happens."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minisgl.plugins.graph.replaying import compile_workers
from minisgl.plugins.graph.replaying.compile_workers import (
    CompileWorkers,
    cache_is_empty,
    early_workers,
    start_early,
    take_early,
)
from minisgl.plugins.kernels.ops.compile_worker import Request

pytest.importorskip("triton", reason="Triton is not installed here")

WRONG = Request("minisgl.plugins.kernels.ops.triton.activation", "no_such_kernel", "{}", ("cuda", 90, 32))


def ended(workers: CompileWorkers) -> bool:
    return all(process.poll() is not None for process in workers._processes)


def test_kernels_that_can_not_be_compiled_are_not_counted() -> None:
    with CompileWorkers(2) as workers:
        workers.compile([WRONG] * 3)
    assert workers.compiled == 0
    assert ended(workers)


def test_an_error_ends_the_processes_at_once() -> None:
    workers = CompileWorkers(2)

    def fail() -> None:
        with workers:
            workers.compile([WRONG] * 1000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ended(workers)
    assert not any(thread.is_alive() for thread in workers._threads)


def test_processes_start_early_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_workers, "MAX_WORKERS", 1)
    monkeypatch.setattr(compile_workers, "_has_gpu", lambda: True)
    for device, tp in (("cpu", 1), ("auto", 2)):
        start_early(device, tp)
        assert take_early() is None
    start_early("auto", 1)
    start_early("cuda", 1)  # a second call starts no more
    workers = take_early()
    assert workers is not None and len(workers._processes) == 1
    assert take_early() is None
    workers.wait()
    with early_workers("auto", 1):
        workers = compile_workers._early
    assert workers is not None and ended(workers)
    assert cache_is_empty()
    (tmp_path / "cache" / "a kernel").mkdir(parents=True)
    assert not cache_is_empty()
    start_early("auto", 1)
    assert take_early() is None


def test_an_engine_that_fails_ends_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine can't be built, the processes that were started early are ended."""
    from minisgl import LLM
    from minisgl.config import ConfigError

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_workers, "_has_gpu", lambda: True)
    monkeypatch.setattr(compile_workers, "MAX_WORKERS", 1)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        LLM("tutor", overrides=["device=cuda"])
    assert take_early() is None
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, minisgl.plugins.graph.replaying.compile_workers; assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
