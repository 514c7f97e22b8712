"""A first start in FP8 that need not wait for compilers: one product serves requests until another one is compiled.

FlashInfer's FP8 product takes two minutes to compile. Triton's takes seconds, but is slower: see docs/design/fp8.md. So
on a machine without FlashInfer's kernels, the engine starts with Triton's product, other processes compile
FlashInfer's, and then the engine changes over between two steps. Graphs, which contain the kernels of the first
product, are recorded again, each before its next replay, so no step waits for more than one recording.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from minisgl.core import Step
from minisgl.engine.model_runner import Forward, StepRunner
from minisgl.plugins.kernels.ops.compilations import on_purpose
from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
from minisgl.plugins.kernels.ops.fp8_compiler import Product, compile_kernels, jobs_of, prepare
from minisgl.plugins.kernels.ops.fp8_gemm import Fp8Gemm

__all__ = ["Behind", "ChangingFp8Gemm", "ChangingRunner", "Preparation", "SlowFp8Gemm"]

log = logging.getLogger(__name__)

WORKERS = 2
"""Processes that compile while the engine serves. Each needs about 1 GiB of the memory that the KV pool leaves free."""
NICE = 19
"""The niceness of these processes."""


class Preparation(Protocol):
    """Kernels that are compiled and loaded while the engine serves."""

    def begin_loading(self) -> None:
        """Permit to load what is compiled. Before, the engine may record graphs, in which no thread may allocate."""

    def done(self) -> bool:
        """Return whether all kernels are loaded. It stays False if that failed."""

    def close(self) -> None:
        """End it."""


class SlowFp8Gemm(Fp8Gemm, Protocol):
    """A product whose kernels take long to compile: see `minisgl.plugins.kernels.ops.fp8_gemm.CompiledFp8Gemm`."""

    def prepare(self, weights: Sequence[Any], rows: int) -> None: ...

    def is_prepared(self, weights: Sequence[Any], rows: int) -> bool:
        """Return whether `prepare` would compile nothing."""

    def prepare_behind(self, weights: Sequence[Any], rows: int) -> Preparation:
        """Begin what `prepare` does, and return at once."""


class Behind:
    """Compiles and loads the kernels of FlashInfer's ``product``, in processes and a thread: a `Preparation`."""

    def __init__(self, product: Product, weights: Sequence[Fp8Weight], most: int):
        self._arguments = (product, list(weights), most)
        self._may_load, self._done, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fp8-behind", daemon=True)
        self._thread.start()

    def begin_loading(self) -> None:
        self._may_load.set()

    def done(self) -> bool:
        return self._done.is_set()

    def close(self) -> None:
        self._closed.set()
        self._may_load.set()
        self._thread.join()

    def _run(self) -> None:
        product, weights, most = self._arguments
        device, started = weights[0].values.device, time.monotonic()
        try:
            with on_purpose("deep_gemm"):
                compile_kernels(product, jobs_of(weights, most), device, WORKERS, NICE, self._closed)
                self._may_load.wait()
                if self._closed.is_set():
                    return
                with on_purpose("flashinfer"), torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(device)):
                    prepare(product, weights, most)
        except Exception as error:
            log.warning("FlashInfer's FP8 product can't be used, Triton's stays: %s: %s", type(error).__name__, error)
            return
        log.info("compiled FlashInfer's FP8 product in %.0f s, behind the requests", time.monotonic() - started)
        self._done.set()


class ChangingFp8Gemm:
    """Multiplies by ``then``, and, if `prepare` would have to compile that, by ``first`` until `change` is called.

    With ``behind`` false, `prepare` compiles first. See `Fp8Gemm` for shapes.
    """

    def __init__(self, first: Fp8Gemm, then: SlowFp8Gemm, behind: bool):
        self.first, self.then, self.behind = first, then, behind
        self.changed = True
        self.preparation: Preparation | None = None

    def refuse(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        """Return why one of the two can't multiply: see `Fp8Gemm.refuse`."""
        return self.then.refuse(weight, dtype) or self.first.refuse(weight, dtype)

    def load(self, weight: Fp8Weight, dtype: torch.dtype) -> tuple[Any, Any]:
        """Load the weight for both: see `Fp8Gemm.load`. Neither needs other memory than that of ``weight``."""
        return self.first.load(weight, dtype), self.then.load(weight, dtype)

    def takes_quantized(self, weight: tuple[Any, Any], rows: int) -> bool:
        """Ask the present product: see `Fp8Gemm.takes_quantized`."""
        product = self.then if self.changed else self.first
        return product.takes_quantized(weight[self.changed], rows)

    def forward(self, weight: tuple[Any, Any], x: Tensor | QuantizedRows) -> Tensor:
        """Compute the present product: see `Fp8Gemm.forward`."""
        product = self.then if self.changed else self.first
        return product.forward(weight[self.changed], x)

    def prepare(self, weights: Sequence[tuple[Any, Any]], rows: int) -> None:
        """Compile the kernels of ``then``, or begin to: see `minisgl.plugins.kernels.ops.fp8_gemm.CompiledFp8Gemm`.

        With several ranks all is compiled first: a rank can't record its part of an all-reduce again on its own.
        """
        thens = [then for _, then in weights]
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not self.behind or ranks or self.then.is_prepared(thens, rows):
            self.then.prepare(thens, rows)
            return
        self.changed = False
        log.info("FlashInfer's FP8 product is compiled while Triton's serves: see fp8_gemm.behind")
        self.preparation = self.then.prepare_behind(thens, rows)

    def change(self) -> None:
        """Multiply by ``then`` from now on."""
        self.changed, self.preparation = True, None


class ChangingRunner:
    """Runs steps by ``runner``, and changes the product of ``gemm`` before the first step for which it is ready."""

    def __init__(self, gemm: ChangingFp8Gemm, runner: StepRunner):
        assert gemm.preparation is not None
        self.gemm, self.runner, self._preparation = gemm, runner, gemm.preparation
        self.begin, self.sample, self.read = runner.begin, runner.sample, runner.read

    def start(self) -> None:
        """Start the runner: see `StepRunner.start`."""
        self.runner.start()
        self._preparation.begin_loading()

    def forward(self, step: Step) -> Forward:
        """Change the product if it is ready, and run the step: see `StepRunner.forward`."""
        if self._preparation.done():
            self.gemm.change()
            for each in _chain(self.runner):
                if (forget := getattr(each, "forget", None)) is not None:
                    forget()
            log.info("changed to FlashInfer's FP8 product before step %d", step.id)
            self.forward = self.runner.forward  # type: ignore[method-assign]
        return self.runner.forward(step)

    def close(self) -> None:
        """End the compilations and close the runner: see `StepRunner.close`."""
        self._preparation.close()
        self.runner.close()


def _chain(runner: Any) -> Iterable[Any]:
    """Yield a runner and those that it wraps."""
    while runner is not None:
        yield runner
        runner = getattr(runner, "runner", None)
