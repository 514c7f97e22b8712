"""All decoder layers of a model in fewer launches or calls, where the number of rows and the layers allow it."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl.models.converter import convert
from minisgl.models.decoder import DecoderLayers
from minisgl.plugins.kernels.converted import few_rows, fused_layers
from minisgl.plugins.kernels.converted.cpu_layers import CpuDecoderLayers

__all__ = ["FusedDecoderLayers", "convert_decoder"]


class FusedDecoderLayers(DecoderLayers):
    """`DecoderLayers` that computes all layers with fused kernels, if no plugin replaced one and rows are few."""

    def forward(
        self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor, logits_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute all layers: see `DecoderLayers.forward`. With fused kernels, the residual stream is complete."""
        if logits_indices is None:
            if few_rows.serves(self, x):
                return few_rows.forward(self, x, cos_sin, out_cache_loc), None
            if fused_layers.serves(self, x):
                return fused_layers.forward(self, x, cos_sin, out_cache_loc), None
        return super().forward(x, cos_sin, out_cache_loc, logits_indices)


def convert_decoder(model: nn.Module) -> None:
    """Convert the decoder layers of a model."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    convert(model, {DecoderLayers: FusedDecoderLayers if on_gpu else CpuDecoderLayers})
