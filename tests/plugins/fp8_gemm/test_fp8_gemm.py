"""The choice of an FP8 product: what each plugin refuses, and how ``auto`` splits the numbers of rows."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl import LLM
from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.fp8_gemm.auto import FEW_ROWS, AutoFp8Gemm
from minisgl.plugins.fp8_gemm.flashinfer import FlashInferFp8Gemm
from minisgl.plugins.fp8_gemm.torch import TorchFp8Gemm
from minisgl.plugins.kernels.ops.fp8 import E4M3, Fp8Weight, blocks

CPU = torch.device("cpu")


def weight_of(out: int, inner: int) -> Fp8Weight:
    """Return a weight of zeros."""
    return Fp8Weight(torch.zeros(out, inner).to(E4M3), torch.ones(blocks(out), blocks(inner)))


def build(name: str) -> Any:
    """Build the product ``name`` for the CPU."""
    manager = PluginManager.load()
    return manager.build("fp8_gemm", manager.make("fp8_gemm", name), device=CPU)


class Named:
    """A product that serves weights of at least ``least`` rows and returns its name."""

    def __init__(self, name: str, least: int):
        self.name, self.least = name, least

    def refuse(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        return "" if len(weight.values) >= self.least else "too small"

    def load(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        return self.name

    def takes_quantized(self, weight: str, rows: int) -> bool:
        assert weight == self.name
        return self.name == "many"

    def forward(self, weight: str, x: torch.Tensor) -> Any:
        assert weight == self.name
        return self.name


def test_a_cpu_gets_the_reference() -> None:
    assert isinstance(build("auto"), TorchFp8Gemm)
    assert isinstance(build("torch"), TorchFp8Gemm)


def test_triton_needs_a_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    with pytest.raises(ConfigError, match=r"fp8_gemm=triton: .* On a CPU use fp8_gemm=torch"):
        build("triton")


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_flashinfer_must_be_installed() -> None:
    with pytest.raises(ConfigError, match=r"fp8_gemm=flashinfer: .*flashinfer"):
        build("flashinfer")


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((128, 256), torch.bfloat16, ""),
        ((128, 256), torch.float16, "needs dtype=bfloat16, not float16"),
        ((96, 256), torch.bfloat16, "multiples of 64 rows and 128 columns"),
        ((128, 192), torch.bfloat16, "multiples of 64 rows and 128 columns"),
    ],
)
def test_flashinfer_refuses_shapes(shape: tuple[int, int], dtype: torch.dtype, message: str) -> None:
    reason = FlashInferFp8Gemm.refuse(SimpleNamespace(), weight_of(*shape), dtype)  # type: ignore[arg-type]
    assert message in reason
    assert bool(message) == bool(reason)


def test_auto_chooses_by_rows_and_shape() -> None:
    """The first product that serves the shape, of those for few rows or for more."""
    few, many, any_shape = Named("few", 100), Named("many", 200), Named("any", 0)
    gemm = AutoFp8Gemm([few, any_shape], [many, few, any_shape])
    cases = [
        ((50, 16), "any", "any"),
        ((150, 16), "few", "few"),
        ((250, 16), "few", "many"),
        ((250, 512), "few", "many"),
    ]
    for shape, *expected in cases:
        weight = weight_of(*shape)
        assert gemm.refuse(weight, torch.bfloat16) == ""
        loaded = gemm.load(weight, torch.bfloat16)
        rows = (FEW_ROWS, FEW_ROWS + 1)
        assert [gemm.forward(loaded, torch.zeros(n, shape[1])) for n in rows] == expected
        assert [gemm.takes_quantized(loaded, n) for n in rows] == [name == "many" for name in expected]


def test_auto_prepares_the_products_of_each_backend() -> None:
    """A backend that compiles while it multiplies gets its own weights, once."""

    class Compiled(Named):
        def prepare(self, weights: list[str], rows: int) -> None:
            prepared.append((self.name, weights, rows))

    prepared: list[Any] = []
    many, few = Compiled("many", 200), Compiled("few", 0)
    auto = AutoFp8Gemm([few], [many, few])
    weights = [auto.load(weight_of(out, 128), torch.bfloat16) for out in (256, 128, 256)]
    auto.prepare(weights, 77)
    assert sorted(prepared) == [("few", ["few"] * 4, 77), ("many", ["many"] * 2, 77)]
    prepared.clear()
    AutoFp8Gemm([Named("few", 0)], [many, Named("few", 0)]).prepare(weights[:0], 77)
    assert prepared == []


@pytest.mark.parametrize(("prefill", "most"), [(300, 300), (100, 256)])
def test_the_engine_prepares_all_matrices_for_its_longest_step(
    prefill: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has at most ``max_prefill_tokens`` tokens of prompts, or ``max_running_requests`` decode rows."""
    calls: list[tuple[list[Any], int]] = []

    def prepare(product: TorchFp8Gemm, weights: list[Any], rows: int) -> None:
        calls.append((weights, rows))

    monkeypatch.setattr(TorchFp8Gemm, "prepare", prepare, raising=False)
    options = ["device=cpu", "quantize=fp8", "fp8_gemm=torch", "num_pages=64"]
    options += [f"max_prefill_tokens={prefill}", "max_running_requests=256"]
    with LLM("tutor", overrides=options) as llm:
        (weights, rows), *others = calls
        assert (rows, others) == (most, [])
        layers = llm.engine.model.layers
        products = [
            (each.self_attn.qkv_proj, each.self_attn.o_proj, each.mlp.gate_up_proj, each.mlp.down_proj)
            for each in layers
        ]
        assert len(weights) == sum(len(each.fp8.loaded) for layer in products for each in layer) >= 4 * len(layers)
