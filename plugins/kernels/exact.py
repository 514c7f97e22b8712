"""``kernels=exact``: each row of each layer is computed in one fixed order, whatever the other rows are.

``exact=true`` selects this file and `plugins/attention/exact.py` (``conf/exact/true.yaml``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from minisgl.models.converter import Kernels


@dataclass
class ExactKernels:
    """Products, norms, activations and sampling whose bits do not depend on the batch or on tp=1, 2."""

    def build(self, device: torch.device) -> Kernels:
        """Build the converter of the device. Raises `ConfigError` on a CPU without a C++ compiler."""
        if in_triton(device):
            from minisgl.plugins.kernels.converted.exact_triton import FixedOrderTritonKernels

            return FixedOrderTritonKernels()
        from minisgl.plugins.kernels.converted.exact import FixedOrderKernels
        from minisgl.plugins.kernels.ops.cpp import elementwise, linear

        if linear.compiled() is None or elementwise.compiled() is None:
            raise ConfigError("kernels=exact needs minisgl[cpp] and a C++ compiler.")
        return FixedOrderKernels()


def in_triton(device: torch.device) -> bool:
    """Return whether exact kernels for ``device`` are written in Triton: on a GPU, and under Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def refuse_quantized(model: nn.Module) -> None:
    """Raise `ConfigError` if a layer multiplies weights in FP8. Such a layer says so in ``weights_in``."""
    for module in model.modules():
        if form := getattr(module, "weights_in", ""):
            raise ConfigError(
                f"exact=true does not serve weights in {form}: their products have no fixed order of sums. Leave "
                "exact=true out, or use a model with weights in 16 bits without quantize."
            )


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "exact", ExactKernels
