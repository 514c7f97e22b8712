"""A process that compiles Triton kernels for another one, into Triton's cache on disk: it needs no GPU, and uses none.

``python -m minisgl.plugins.kernels.ops.compile_worker`` reads requests from standard input, one JSON object a line
(`Request`), and answers each with a line: ``ok``, or the error. It ends when its input ends. An engine starts several
(`plugins/graph/replaying/compile_ahead.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import sys
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Request", "compile_kernel", "main", "use_target"]


@dataclass(frozen=True)
class Request:
    """A kernel to compile: the function ``name`` of ``module``, as Triton describes a compilation to its hooks.

    ``data`` is Triton's JSON of types, constants and options (``specialization_data``); ``target`` has the fields of
    its ``GPUTarget``.
    """

    module: str
    name: str
    data: str
    target: tuple[str, int, int]

    def encode(self) -> str:
        """Return the request as a line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def decode(cls, line: str) -> Request:
        """Return the request of a line."""
        fields = json.loads(line)
        return cls(**{**fields, "target": tuple(fields["target"])})


def compile_kernel(request: Request) -> None:
    """Compile a kernel, and the C code that launches it, where this version of Triton has such code.

    Raises what the import of the module or the compilation raises.
    """
    use_target(request.target)
    kernel = getattr(importlib.import_module(request.module), request.name).preload(request.data)
    with contextlib.suppress(Exception):  # newer versions have one launcher for all kernels, which needs the driver
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


class _Target:
    """What a compilation asks of Triton's driver, without the driver of a GPU. ``target`` is a ``GPUTarget``."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        """Return the target to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return the number of a device: there is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the number of a stream, which nothing uses."""
        return 0


def use_target(target: tuple[str, int, int]) -> None:
    """Let Triton compile for ``target``, the fields of a ``GPUTarget``, in this process. Launches will fail."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Target(GPUTarget(*target)))


def main() -> None:
    """Answer requests until the input ends. The modules with kernels are imported before the first request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    for module in pkgutil.iter_modules(importlib.import_module("minisgl.plugins.kernels.ops.triton").__path__):
        with contextlib.suppress(Exception):  # a request for one of its kernels is answered with the error
            importlib.import_module(f"minisgl.plugins.kernels.ops.triton.{module.name}")
    for line in sys.stdin:
        try:
            compile_kernel(Request.decode(line))
            answer = "ok"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
