"""``moe=flashinfer`` compared with ``moe=torch`` in float64. The first test may wait minutes for a compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.plugins.moe import MoeBackend
from minisgl.plugins.moe.flashinfer import FlashInfer, FlashInferMoe
from minisgl.plugins.moe.torch import TorchMoe
from minisgl.testing.moe import CASES, MoeCase, MoeConformance, Problem, problem

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {FP16: 2e-3, BF16: 8e-3}
LARGE = MoeCase(700, 8, 128, hidden=512, inner=256, dtype=BF16)


@pytest.fixture(autouse=True)
def hopper(device: torch.device, compiled: bool) -> None:
    """Skip the test without a Hopper GPU and without FlashInfer."""
    if not compiled or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")


def backend(**options: Any) -> FlashInferMoe:
    """Build the backend, by default without the measurement of kernels, which each new shape would repeat."""
    return FlashInferMoe(FlashInfer(**{"autotune": False, **options}), torch.device("cuda"))


def error(got: Tensor, given: Problem, activation: str = "silu") -> float:
    """Return the relative error of a result in the Frobenius norm, compared with ``moe=torch`` in float64."""
    wide = (t.double().cpu() if t.is_floating_point() else t.cpu() for t in (given.x, given.ids, given.scale))
    weights = (given.gate_up.double().cpu(), given.down.double().cpu())
    want = Problem(*weights, given.local_experts, *wide).solve(TorchMoe(), activation)
    return ((got.double().cpu() - want).norm() / want.norm()).item()


class TestFlashInfer(MoeConformance):
    device = "cuda"
    dtype = BF16
    cases = (*(replace(case, dtype=BF16) for case in CASES), MoeCase(17, dtype=FP16))

    def make(self) -> MoeBackend:
        """Build the backend to test."""
        return backend()


@pytest.mark.parametrize(
    "case",
    [
        *(MoeCase(*sizes, hidden=64, inner=32) for sizes in ((9, 2, 8), (5, 3, 7), (20, 4, 60), (3, 8, 128))),
        *(MoeCase(6, 2, 4, hidden=hidden, inner=inner) for hidden, inner in ((48, 40), (136, 72), (16, 16))),
        *(MoeCase(6, activation=name) for name in ("gelu", "gelu_pytorch_tanh")),
        *(replace(LARGE, tokens=tokens) for tokens in (1, 64, 700, 4096)),
        replace(LARGE, local_experts=range(40, 72)),
        replace(LARGE, dtype=FP16),
    ],
    ids=str,
)
def test_cases(case: MoeCase) -> None:
    case = case if case.dtype == FP16 else replace(case, dtype=BF16)
    given = problem(case, "cuda")
    assert error(given.solve(backend(), case.activation), given, case.activation) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("fused_finalize", [False, True])
def test_autotune(fused_finalize: bool) -> None:
    """The measured kernels compute the same as the default ones, for numbers of tokens that have different kernels."""
    tuned = backend(autotune=True, fused_finalize=fused_finalize)
    for tokens in (1, 64, 700, 4096):
        given = problem(replace(LARGE, tokens=tokens), "cuda")
        assert error(given.solve(tuned), given) < TOLERANCE[BF16]
    assert len(tuned.tuned) == 1


@pytest.mark.parametrize("autotune", [False, True])
def test_in_a_graph(autotune: bool) -> None:
    """A recorded call computes what the buffers hold at each replay. It may be the first call of a backend."""
    moe, (first, second) = backend(autotune=autotune), (problem(replace(LARGE, tokens=33), "cuda", i) for i in range(2))
    weights = moe.load(first.gate_up, first.down, first.local_experts, "silu")
    inputs, out = [t.clone() for t in (first.x, first.ids, first.scale)], torch.empty_like(first.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        moe.forward(weights, *inputs, out)
    for given in (first, second):
        for target, source in zip(inputs, (given.x, given.ids, given.scale), strict=True):
            target.copy_(source)
        graph.replay()
        assert error(out, given._replace(gate_up=first.gate_up, down=first.down)) < TOLERANCE[BF16]


def test_no_device_synchronisation() -> None:
    """After the first call, ``forward`` does not make the host wait for the device."""
    moe, given = backend(), problem(MoeCase(33, dtype=BF16), "cuda")
    weights = moe.load(given.gate_up, given.down, given.local_experts, "silu")
    out = torch.empty_like(given.x)
    moe.forward(weights, given.x, given.ids, given.scale, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe.forward(weights, given.x, given.ids, given.scale, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
