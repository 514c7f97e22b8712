"""Kernels in C++ and CUDA C++, compiled on the user's machine at first use.

They are alternatives to a Triton kernel (`rope.cu`) and to a numpy function (`compare.cpp`). apache-tvm-ffi runs the
compiler, caches the compiled library by a hash of the source (in ~/.cache/tvm-ffi, or TVM_FFI_CACHE_DIR), and passes
arrays and tensors without copying them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError

HERE = Path(__file__).parent


def load(name: str) -> Any:
    """Compile and load the source file ``name`` (a .cpp or .cu file of this folder).

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
        return cpp.load(f"minisgl_{Path(name).stem}", extra_cflags=["-O3"], **source)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{name} could not be compiled here: {error}") from error


def _find(tool: str) -> str | None:
    """Return the path of the program ``tool``, searched on PATH and in CUDA's own folder, or None."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, homes), "/usr/local/cuda/bin"])
    return shutil.which(tool, path=path)
