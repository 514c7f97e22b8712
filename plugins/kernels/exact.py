"""``kernels=exact``: each row of each layer is computed in one fixed order, whatever the other rows are.

``exact=true`` selects this file and `plugins/attention/exact.py` (``conf/exact/true.yaml``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.models.converter import Kernels


@dataclass
class ExactKernels:
    """Products, norms, activations and sampling whose bits do not depend on the batch or on tp=1, 2. CPU only."""

    def build(self, device: torch.device) -> Kernels:
        """Build the converter. Raises `ConfigError` without a CPU, and without a C++ compiler."""
        from minisgl.plugins.kernels.converted.exact import FixedOrderKernels
        from minisgl.plugins.kernels.ops.cpp import elementwise, linear

        if device.type != "cpu":
            raise ConfigError(
                f"kernels=exact computes on a CPU, not on {device.type}; there are no such GPU kernels yet."
            )
        if linear.compiled() is None or elementwise.compiled() is None:
            raise ConfigError("kernels=exact needs minisgl[cpp] and a C++ compiler.")
        return FixedOrderKernels()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "exact", ExactKernels
