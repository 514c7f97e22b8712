"""``fp8_gemm=auto``: the fastest product for the device, the shape and the number of rows.

A GPU with e4m3 gets ``triton``. But a Hopper GPU gets ``flashinfer`` for more than one row, if it is installed and
serves the shape. A CPU, or a GPU without e4m3 or Triton, gets ``torch``. What is faster was measured on an H200: see
docs/design/fp8.md. On a machine where FlashInfer's product is not compiled yet, ``triton`` serves until it is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.plugins.kernels.ops.activation import Act
    from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
    from minisgl.plugins.kernels.ops.fp8_gemm import Fp8Gemm

FEW_ROWS = 1
"""Up to this number of rows ``triton`` is faster than ``flashinfer``, on an H200 with the matrices of Qwen3-14B."""


@dataclass
class Auto:
    """The fastest installed product for this device, shape and number of rows."""

    behind: bool = True
    """If FlashInfer's product must be compiled, which takes two minutes, start with Triton's and change over when it is
    compiled. False: compile first, for measurements. With ``tp`` above 1 it is always compiled first."""

    def build(self, device: torch.device, build_other: Callable[[str], Fp8Gemm]) -> Fp8Gemm:
        """Build the backends that can be used on the device."""
        import torch

        reference = build_other("torch")
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        if capability < (8, 9) or importlib.util.find_spec("triton") is None:
            return reference
        few = [build_other("triton"), reference]
        if capability[0] != 9 or importlib.util.find_spec("flashinfer") is None:
            return AutoFp8Gemm(few, few)
        from minisgl.plugins.kernels.ops.fp8_behind import ChangingFp8Gemm

        flashinfer: Any = build_other("flashinfer")
        return AutoFp8Gemm(few, [ChangingFp8Gemm(few[0], flashinfer, self.behind), *few])


class Product(NamedTuple):
    """A backend, and a weight as the backend loaded it."""

    backend: Fp8Gemm
    weight: Any


class AutoFp8Gemm:
    """The backend; see `minisgl.plugins.kernels.ops.fp8_gemm.Fp8Gemm` for shapes.

    ``few`` are the backends for at most `FEW_ROWS` rows and ``many`` those for more rows, best first. A weight is
    multiplied by the first backend that serves its shape; the last one serves all shapes.
    """

    def __init__(self, few: Sequence[Fp8Gemm], many: Sequence[Fp8Gemm]):
        self.few, self.many = few, many

    def refuse(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        """Return "": plain torch multiplies any shape and dtype."""
        return ""

    def load(self, weight: Fp8Weight, dtype: torch.dtype) -> tuple[Product, Product]:
        """Choose the products of few and of many rows: see `Fp8Gemm.load`."""
        many = next(backend for backend in self.many if not backend.refuse(weight, dtype))
        few = next(backend for backend in self.few if not backend.refuse(weight, dtype))
        return Product(few, few.load(weight, dtype)), Product(many, many.load(weight, dtype))

    def takes_quantized(self, weight: tuple[Product, Product], rows: int) -> bool:
        """Ask the backend for this number of rows: see `Fp8Gemm.takes_quantized`."""
        backend, loaded = weight[rows > FEW_ROWS]
        return backend.takes_quantized(loaded, rows)

    def forward(self, weight: tuple[Product, Product], x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Compute the product with the backend for this number of rows: see `Fp8Gemm.forward`."""
        backend, loaded = weight[len(x) > FEW_ROWS]
        return backend.forward(loaded, x)

    def forward_gated(
        self, weight: tuple[Product, Product], x: torch.Tensor | QuantizedRows, act: Act
    ) -> torch.Tensor | None:
        """Compute it with the backend for this number of rows, if that can: see `GatedFp8Gemm.forward_gated`."""
        backend, loaded = weight[len(x) > FEW_ROWS]
        gated: Any = getattr(backend, "forward_gated", None)
        return None if gated is None else gated(loaded, x, act)

    def prepare(self, weights: Sequence[tuple[Product, Product]], rows: int) -> None:
        """Let each backend prepare the weights that it multiplies: see `CompiledFp8Gemm.prepare`."""
        for backend in {id(each): each for each in (*self.few, *self.many)}.values():
            chosen = [product.weight for pair in weights for product in pair if product.backend is backend]
            prepare: Any = getattr(backend, "prepare", None)
            if chosen and prepare is not None:
                prepare(chosen, rows)


@hookimpl
def minisgl_wrap_runner() -> Any:
    """Change the product between two steps, if one is compiled while another one serves."""

    def wrap(runner: Any, model_runner: Any) -> Any:
        modules: Any = getattr(model_runner.model, "modules", tuple)
        gemms = {getattr(getattr(module, "fp8", None), "gemm", None) for module in modules()}
        for backend in (each for gemm in gemms for each in getattr(gemm, "many", ())):
            if getattr(backend, "preparation", None) is not None:
                from minisgl.plugins.kernels.ops.fp8_behind import ChangingRunner

                runner = ChangingRunner(backend, runner)
        return runner

    return wrap


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "fp8_gemm", "auto", Auto
