"""A count of the kernels that were compiled, or loaded from a cache on disk, after the engine was ready.

A step that launches such a kernel waits for it: milliseconds if the compiled kernel is on disk, seconds if it is not.
The warm-up of an engine launches kernels of all kinds before that. The count shows those that it missed.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Compilations", "deep_gemm_folder", "deep_gemm_kernels", "on_purpose"]

log = logging.getLogger(__name__)


class Compilations:
    """The kernels compiled or loaded in this process since the object was made, by compiler.

    Triton calls a hook for each kernel. FlashInfer keeps a list of its modules, and FlashAttention's CuTe kernels are
    in a cache, whose sizes are compared with those at the beginning. A library that this process has not imported when
    the object is made counts from its import on. Of DeepGEMM only compilations are counted, by the kernels on disk, so
    those of other processes of the same user count too. What is made inside `on_purpose` does not count.
    """

    def __init__(self) -> None:
        self.triton: list[str] = []  # names of the kernels
        self._begin = self._sizes()
        if (triton := sys.modules.get("triton")) is not None:
            _watched(triton.knobs.runtime).add(self)

    def counts(self) -> dict[str, int]:
        """Return the number of kernels (FlashInfer: modules) of each compiler."""
        late = {name: size - self._begin[name] for name, size in self._sizes().items()}
        if not _uses_deep_gemm():
            late["deep_gemm"] = 0
        return {"triton": len(self.triton), **late}

    @staticmethod
    def _sizes() -> dict[str, int]:
        """Return how many kernels each library has compiled or loaded, according to its list or its cache."""
        sizes = {"cute": len(_cute_kernels())}
        return {**sizes, **{name: purpose.late() for name, purpose in _PURPOSES.items()}}

    def metrics(self) -> str:
        """Return the counts in Prometheus' text format."""
        name = "minisgl_late_compilations_total"
        head = f"# HELP {name} Kernels compiled or loaded after the start\n# TYPE {name} counter\n"
        return head + "".join(f'{name}{{compiler="{compiler}"}} {n}\n' for compiler, n in self.counts().items())


class _Purpose:
    """Divides a library's kernels into those that were made in `on_purpose`, and others. ``size`` counts all of them.

    Threads may be in `on_purpose` at the same time.
    """

    def __init__(self, size: Callable[[], int]):
        self.size, self._lock = size, threading.Lock()
        self._made = self._threads = self._begin = 0  # kernels made; threads that make some, and the size before

    def late(self) -> int:
        """Return the number of the other kernels."""
        with self._lock:
            return (self._begin if self._threads else self.size()) - self._made

    def enter(self) -> None:
        with self._lock:
            if not self._threads:
                self._begin = self.size()
            self._threads += 1

    def leave(self) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._made += self.size() - self._begin


@contextmanager
def on_purpose(compiler: str) -> Iterator[None]:
    """Do not count what is compiled or loaded meanwhile: no step waits for it.

    ``compiler`` is ``deep_gemm`` or ``flashinfer``.
    """
    _PURPOSES[compiler].enter()
    try:
        yield
    finally:
        _PURPOSES[compiler].leave()


class _Hook:
    """Triton's hook after a compilation. It tells every live `Compilations`, and calls the hook that was set before."""

    def __init__(self, before: Any):
        self.before = before
        self.counts: weakref.WeakSet[Compilations] = weakref.WeakSet()

    def __call__(self, **compiled: Any) -> Any:
        name = compiled["fn"].name.rpartition(".")[2]
        if self.counts:
            log.warning("the kernel %s was compiled or loaded after the start; a step waited for it", name)
        for count in self.counts:
            count.triton.append(name)
        return self.before(**compiled) if self.before is not None else None


def _watched(runtime: Any) -> weakref.WeakSet[Compilations]:
    """Return the counts that Triton's hook tells, and set the hook if it is not ours yet."""
    hook = runtime.jit_post_compile_hook
    if not isinstance(hook, _Hook):
        hook = runtime.jit_post_compile_hook = _Hook(hook)
    return hook.counts


def _flashinfer_modules() -> Any:
    """Return FlashInfer's modules that were asked for so far. FlashInfer compiles or loads each when it is asked."""
    module = sys.modules.get("flashinfer.jit.core")
    return module.jit_spec_registry.get_all_specs() if module is not None else ()


def _cute_kernels() -> Any:
    """Return the forward kernels that FlashAttention compiled or loaded so far."""
    module = sys.modules.get("flash_attn.cute.interface")
    return module._flash_attn_fwd.compile_cache.cache if module is not None else ()


def _uses_deep_gemm() -> bool:
    """Return whether this process has loaded FlashInfer's FP8 product, which contains DeepGEMM."""
    module = sys.modules.get("flashinfer.gemm.gemm_base")
    return module is not None and module.get_fp8_blockscale_gemm_runner_sm90.cache_info().currsize > 0


def deep_gemm_folder() -> Path:
    """Return the folder in which the DeepGEMM of FlashInfer keeps what it compiles."""
    home = os.environ.get("HOME")
    default = Path(home, ".tensorrt_llm") if home else Path(tempfile.gettempdir(), "tensorrt_llm")
    return Path(os.environ.get("TRTLLM_DG_CACHE_DIR") or default)


def deep_gemm_kernels() -> int:
    """Return how many kernels the DeepGEMM of FlashInfer has compiled into its cache on disk."""
    return sum(1 for _ in (deep_gemm_folder() / "cache").glob("*/*.cubin"))


_PURPOSES = {
    "flashinfer": _Purpose(lambda: len(_flashinfer_modules())),
    "deep_gemm": _Purpose(deep_gemm_kernels),
}
