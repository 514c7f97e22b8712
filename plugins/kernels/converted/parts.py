"""What ``kernels=triton`` and ``kernels=cpp`` build. The functions of `ops` choose the kernel for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from minisgl.models.converter import Kernels
from minisgl.plugins.kernels.converted.decoder_layers import convert_decoder
from minisgl.plugins.kernels.converted.gated_delta import convert_gated_delta
from minisgl.plugins.kernels.converted.layers import convert_layers, use_huge_pages
from minisgl.plugins.kernels.ops.compilations import Compilations

if TYPE_CHECKING:
    from minisgl.engine.sampler import Sampler


class ConvertedKernels(Kernels):
    """Converts all layers, and the sampler on a GPU. ``compilations`` counts the kernels compiled after the start."""

    def __init__(self) -> None:
        self.compilations: Compilations | None = None

    def before_loading(self, model: nn.Module) -> None:
        """Put large weights on a CPU in huge pages."""
        use_huge_pages(model)

    def after_loading(self, model: nn.Module) -> None:
        """Convert the layers, one by one, and on a GPU the decoder layers together."""
        convert_layers(model)
        convert_gated_delta(model)
        convert_decoder(model)

    def convert_sampler(self, sampler: Sampler) -> None:
        """Choose tokens with Triton kernels on a GPU."""
        if sampler.device.type == "cuda":
            from minisgl.plugins.kernels.ops.triton import sampling

            sampler.draw, sampler.argmax = sampling.gumbel_argmax, sampling.gumbel_argmax
            sampler.mask_tokens = sampling.mask_tokens

    def ready(self) -> None:
        """Begin to count the kernels that steps wait for."""
        self.compilations = Compilations()

    def metrics(self) -> str:
        """Return the number of late compilations in Prometheus' text format."""
        return "" if self.compilations is None else self.compilations.metrics()
