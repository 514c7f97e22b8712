"""Measures the time of a kernel, and compares it with the bytes to move and the operations to compute."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BANDWIDTH = 4.3e12  # bytes/s: a large device-to-device copy on an H200, bytes read plus bytes written
COMPUTE = 790e12  # FLOP/s: a large bf16 matrix product on an H200
BF16 = torch.bfloat16


@dataclass
class Case:
    """One kernel on one shape: the bytes and FLOPs that any implementation needs, and its versions by name."""

    kernel: str
    shape: str
    bytes: float
    flops: float = 0.0
    versions: dict[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The time of one version of a case, in microseconds. ``us`` is None if the version failed; ``note`` says why."""

    kernel: str
    shape: str
    version: str
    us: float | None
    gb_s: float | None = None
    tflop_s: float | None = None
    share: float | None = None
    note: str = ""


def time_us(run: Callable[[], Any]) -> float:
    """Return the median microseconds of a call.

    Ten calls are captured in a CUDA graph, unless the call waits for the device.
    """
    with torch.inference_mode():
        run()  # compile and plan
        torch.cuda.synchronize()
        timed, calls = run, 1
        if not synchronizes(run):
            graph, calls = torch.cuda.CUDAGraph(), 10
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    run()
            timed = graph.replay
        times = []
        for i in range(23):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            timed()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(begin.elapsed_time(end) * 1000 / calls)
        return float(statistics.median(times))


def synchronizes(run: Callable[[], Any]) -> bool:
    """Return whether a call waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def measure(case: Case) -> list[Measured]:
    """Measure all versions of a case."""
    lines = []
    for version, run in case.versions.items():
        try:
            us = time_us(run)
        except Exception as error:  # a kernel of another library may not support the shape
            lines.append(
                Measured(case.kernel, case.shape, version, None, note=f"{type(error).__name__}: {error}"[:200])
            )
            continue
        seconds = us / 1e6
        moving, computing = case.bytes / BANDWIDTH, case.flops / COMPUTE
        gb_s = case.bytes / seconds / 1e9 if moving >= computing else None
        tflop_s = case.flops / seconds / 1e12 if moving < computing else None
        lines.append(Measured(case.kernel, case.shape, version, us, gb_s, tflop_s, max(moving, computing) / seconds))
    return lines


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a random tensor on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype)
