"""``moe=flashinfer`` without a GPU: its refusals, and what it passes to FlashInfer. tests/gpu tests the results."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.moe import MoeBackend
from minisgl.plugins.moe.flashinfer import FlashInfer, FlashInferMoe
from minisgl.plugins.moe.torch import TorchMoe
from minisgl.testing.moe import CASES, MoeCase, MoeConformance, problem

GPU = torch.device("cuda")
BF16 = torch.bfloat16


class Activation(IntEnum):
    """Stands for FlashInfer's ``ActivationType``, in an older version without tanh."""

    Swiglu = 3
    Geglu = 4


class Library:
    """Stands for FlashInfer: ``cutlass_fused_moe`` computes in torch what FlashInfer computes, from its arguments."""

    ActivationType = Activation

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []  # the keyword arguments of each call
        self.tuning = False

    @contextmanager
    def autotune(self) -> Any:
        self.tuning = True
        yield
        self.tuning = False

    def get_cutlass_fused_moe_module(self, arch: str) -> None:
        assert arch == "90"

    def cutlass_fused_moe(self, x: Any, ids: Any, scale: Any, up_gate: Any, down: Any, dtype: Any, **more: Any) -> Any:
        self.calls.append({**more, "tuning": self.tuning})
        assert (ids.dtype, scale.dtype, dtype) == (torch.int32, torch.float32, x.dtype)
        assert more["ep_rank"] < more["ep_size"]
        up, gate = up_gate.chunk(2, dim=1)
        first, backend = more["ep_rank"] * len(down), TorchMoe()
        act = {Activation.Swiglu: "silu", Activation.Geglu: "gelu"}[more["activation_type"]]
        weights = backend.load(torch.cat((gate, up), 1), down, range(first, first + len(down)), act)
        return backend.forward(weights, x, ids, scale, more["output"])


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Install `Library` as FlashInfer, on a machine that seems to have a Hopper GPU."""
    made = Library()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", SimpleNamespace(core=made))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


class TestArguments(MoeConformance):
    dtype = BF16
    cases = tuple(replace(case, dtype=BF16) for case in CASES)

    def make(self) -> MoeBackend:
        """Build the backend to test."""
        return FlashInferMoe(FlashInfer(), GPU)


def build(device: torch.device) -> Any:
    """Build the backend with default options, as an engine does."""
    manager = PluginManager.load()
    return manager.build("moe", manager.make("moe", "flashinfer"), device=device)


def test_it_is_a_plugin() -> None:
    assert isinstance(build(GPU), FlashInferMoe)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"moe=flashinfer: .* On a CPU use moe=torch"):
        build(torch.device("cpu"))


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ConfigError, match=r"moe=flashinfer: .* Hopper GPU: use moe=triton"):
        build(GPU)


def test_it_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"moe=flashinfer: it needs the package 'flashinfer'.*'minisgl\[gpu\]'"):
        build(GPU)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (MoeCase(1), "can't serve dtype=float32: use dtype=bfloat16, or moe=triton"),
        (MoeCase(1, hidden=36, dtype=BF16), r"multiples of 8, but the hidden size is 36.*use moe=triton"),
        (MoeCase(1, inner=20, dtype=BF16), r"multiples of 8.*the inner size 20: use moe=triton"),
        (MoeCase(1, activation="relu", dtype=BF16), r"no activation 'relu': use silu, gelu"),
        (MoeCase(1, activation="gelu_pytorch_tanh", dtype=BF16), "no activation 'gelu_pytorch_tanh'"),
    ],
    ids=str,
)
def test_refusals(case: MoeCase, message: str) -> None:
    with pytest.raises(ConfigError, match=f"moe=flashinfer .*{message}"):
        problem(case).solve(build(GPU), case.activation)


@pytest.mark.parametrize("autotune", [True, False])
def test_only_the_first_call_is_tuned(autotune: bool, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call for each ``top_k``, unless it is recorded in a graph."""
    backend = FlashInferMoe(FlashInfer(autotune=autotune), GPU)
    with monkeypatch.context() as recorded:
        recorded.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        problem(MoeCase(1, dtype=BF16)).solve(backend)
    for case in (MoeCase(1, dtype=BF16), MoeCase(2, dtype=BF16), MoeCase(2, top_k=1, dtype=BF16)):
        problem(case).solve(backend)
    assert [call["tuning"] for call in library.calls] == [False, autotune, False, autotune]


def test_enough_experts_for_a_token(library: Library) -> None:
    """A token chooses ``top_k`` different experts of ``ep_size`` ranks: with fewer experts, tuning would not end."""
    problem(MoeCase(3, top_k=4, local_experts=range(1), dtype=BF16)).solve(build(GPU))
    assert library.calls[0]["ep_size"] == 4


@pytest.mark.parametrize("fused", [True, False])
def test_fused_finalize(fused: bool, library: Library) -> None:
    problem(MoeCase(1, dtype=BF16)).solve(FlashInferMoe(FlashInfer(fused_finalize=fused), GPU))
    assert library.calls[0]["use_fused_finalize"] == fused
