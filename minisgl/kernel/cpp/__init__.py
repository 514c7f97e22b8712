"""Kernels in C++ and CUDA C++, compiled on the user's machine at first use.

They are alternatives to a Triton kernel (`rope.cu`), to a numpy function (`compare.cpp`), and to torch operations on a
CPU (`attention.cpp`, `linear.cpp`, `elementwise.cpp`). apache-tvm-ffi runs the compiler, caches the compiled library
(in ~/.cache/tvm-ffi, or TVM_FFI_CACHE_DIR; it compiles again after a change of the source), and passes arrays and
tensors without copying them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError

HERE = Path(__file__).parent


def load(name: str, *, native: bool = False) -> Any:
    """Compile and load the source file ``name`` (a .cpp or .cu file of this folder).

    With ``native`` the compiler may use all vector instructions of this machine's processor. The library is then cached
    for this model of processor, because a home folder may be shared by machines with different processors.

    Returns a module whose attributes are the exported functions. Takes seconds the first time on a machine,
    milliseconds later. Raises `ConfigError` if apache-tvm-ffi or a compiler is missing, or if the compiler fails.
    """
    try:
        from tvm_ffi import cpp
    except ImportError as error:
        raise ConfigError(
            f"{name} is C++ and is compiled by apache-tvm-ffi, which is not installed here ({error}): "
            "pip install 'minisgl[cpp]'."
        ) from error
    cuda = name.endswith(".cu")
    for tool in (os.environ.get("CXX", "c++"), "ninja", *(["nvcc"] if cuda else [])):
        if _find(tool) is None:
            raise ConfigError(f"{name} is C++, and {tool}, which is needed to compile it, is not on PATH.")
    source: dict[str, Any] = {"cuda_files" if cuda else "cpp_files": [str(HERE / name)]}
    try:
        flags = ["-O3", *(_native_flags() if native else ())]
        return cpp.load(f"minisgl_{Path(name).stem}", extra_cflags=flags, **source)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{name} could not be compiled here: {error}") from error


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
