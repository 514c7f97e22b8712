"""Kernels in C++ and CUDA C++, compiled on the user's machine at first use.

They are alternatives to a Triton kernel (`rope.cu`), to a numpy function (`compare.cpp`), and to torch operations on a
CPU (`attention.cpp`, `linear.cpp`, `grouped.cpp`, `elementwise.cpp`), and all of a decoder's layers
(`decoder_layers.cpp`). apache-tvm-ffi runs the compiler, caches the
compiled library (in ~/.cache/tvm-ffi, or TVM_FFI_CACHE_DIR; it compiles again after a change of the source), and passes
arrays and tensors without copying them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError

HERE = Path(__file__).parent

CPU = ("attention.cpp", "decoder_layers.cpp", "elementwise.cpp", "grouped.cpp", "linear.cpp")
"""The sources of the kernels on a CPU. They form one library, so that the compiler runs for all of them in parallel."""

ANNOUNCE_SECONDS = 1.0
"""A compiled library is loaded in milliseconds. If a load takes longer than this, the log says that it compiles."""
REPEAT_SECONDS = 15.0
"""Seconds between two lines of the log while the compiler runs."""

log = logging.getLogger(__name__)


def load(*names: str, native: bool = False, flags: Sequence[str] = ()) -> Any:
    """Compile and load the source files ``names`` (.cpp or .cu files of this folder) as one library.

    With ``native`` the compiler may use all vector instructions of this machine's processor. The library is then cached
    for this model of processor, because a home folder may be shared by machines with different processors. ``flags``
    are further flags for the C++ compiler.

    Returns a module whose attributes are the exported functions. Takes seconds the first time on a machine,
    milliseconds later. Raises `ConfigError` if apache-tvm-ffi or a compiler is missing, or if the compiler fails.
    """
    shown = ", ".join(names)
    try:
        from tvm_ffi import cpp
    except ImportError as error:
        raise ConfigError(
            f"{shown} is C++ and is compiled by apache-tvm-ffi, which is not installed here ({error}): "
            "pip install 'minisgl[cpp]'."
        ) from error
    cuda = any(name.endswith(".cu") for name in names)
    for tool in (os.environ.get("CXX", "c++"), "ninja", *(["nvcc"] if cuda else [])):
        if _find(tool) is None:
            raise ConfigError(f"{shown} is C++, and {tool}, which is needed to compile it, is not on PATH.")
    source: dict[str, Any] = {"cuda_files" if cuda else "cpp_files": [str(HERE / name) for name in names]}
    library = "minisgl_cpu" if len(names) > 1 else f"minisgl_{Path(names[0]).stem}"
    all_flags = ["-O3", *(_native_flags() if native else ()), *flags]
    try:
        with _announced():
            return cpp.load(library, extra_cflags=all_flags, **source)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{shown} could not be compiled here: {error}") from error


@contextlib.contextmanager
def _announced() -> Iterator[None]:
    """Log that kernels are compiled, if the block takes longer than `ANNOUNCE_SECONDS`, and then for how long."""
    done = threading.Event()
    threading.Thread(target=_report, args=(done,), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _report(done: threading.Event) -> None:
    began = time.monotonic()
    if done.wait(ANNOUNCE_SECONDS):
        return
    _announce()
    while not done.wait(REPEAT_SECONDS):
        log.info("the compiler still runs, for %.0f s now", time.monotonic() - began)


@functools.cache  # once in a process
def _announce() -> None:
    log.info(
        "compiling C++ kernels for this machine: about 10 s on an idle machine, minutes on a busy or slow one. The "
        "result is kept in %s, and the next start finds it there",
        Path(os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")).expanduser(),
    )


def _find(tool: str) -> str | None:
    """Return the path of the program ``tool``, searched on PATH and in CUDA's own folder, or None."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, homes), "/usr/local/cuda/bin"])
    return shutil.which(tool, path=path)


@functools.cache
def _native_flags() -> tuple[str, ...]:
    """Return compiler flags for this machine's processor; the flags differ if the processor's abilities differ.

    The macro has no meaning in the source: it makes the flags, by which the library is cached, depend on the processor.
    """
    abilities = platform.processor() + platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        kept = {line for line in lines if line.lower().startswith(("flags", "features", "model"))}
        abilities += "".join(sorted(kept))
    arm = platform.machine() in ("arm64", "aarch64")
    processor = hashlib.sha256(abilities.encode()).hexdigest()[:12]
    return "-mcpu=native" if arm else "-march=native", "-fopenmp-simd", f"-DMINISGL_PROCESSOR={processor}"
