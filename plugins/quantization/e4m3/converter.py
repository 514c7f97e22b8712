"""The converter of ``quantization=fp8``: linear layers get matrices in e4m3, and the layers before them quantise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from minisgl.config import ConfigError
from minisgl.layers.attention import AttentionLayer, RMSNormFused
from minisgl.layers.linear import GatedMLP
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import DecoderLayer
from minisgl.models.weights import Checkpoint
from minisgl.plugins.kernels.ops.fp8_gemm import CompiledFp8Gemm, Fp8Gemm
from minisgl.plugins.kernels.ops.norm import prepare
from minisgl.plugins.models.experts import MoELayer
from minisgl.plugins.quantization.base import Quantization
from minisgl.plugins.quantization.e4m3.checkpoint import Fp8Checkpoint
from minisgl.plugins.quantization.e4m3.experts import Fp8Experts, refuse
from minisgl.plugins.quantization.e4m3.layers import LINEAR, Fp8AttentionLayer, Fp8Linear, Fp8MLP, Fp8NormFused
from minisgl.plugins.quantization.e4m3.matrix import Fp8, Fp8Matrix
from minisgl.plugins.quantization.e4m3.stored import StoredFp8, stored_fp8

__all__ = ["Fp8Converter"]

log = logging.getLogger(__name__)

UNKNOWN = "the experts of this model have no products in FP8"


class Fp8Converter(Quantization):
    """Gives linear layers weights in FP8 on ``device``, for activations in ``dtype``. ``build_gemm`` makes the product.

    Weights that no layer multiplies in FP8 are dequantised.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, build_gemm: Callable[[], Fp8Gemm]):
        self.device, self.dtype, self._build_gemm = device, dtype, build_gemm
        self.layout: StoredFp8 | None = None  # of the checkpoint; None: it has no weights in FP8
        self.quantize = self.has_experts = False
        self.fp8: Fp8 | None = None  # None: no layer is in FP8
        self._checkpoint: Fp8Checkpoint | None = None

    def read(self, config: ModelConfig, quantize: bool) -> None:
        """Read the layout that config.json describes: see `stored_fp8`."""
        self.layout, self.quantize = stored_fp8(config.raw.get("quantization_config")), quantize
        self.has_experts = bool(config.num_experts)

    def open(self, path: str | Path) -> Checkpoint:
        """Open the checkpoint of ``path``. Weights in e4m3 that a layer needs in another dtype are dequantised."""
        if self.layout is None:
            return Checkpoint(path)
        self._checkpoint = Fp8Checkpoint(path, self.layout)
        return self._checkpoint

    def before_loading(self, model: nn.Module) -> None:
        """Give each linear layer that is exactly one of the core's a matrix in e4m3."""
        stored = self.layout is not None and not self.layout.dequantized
        if not stored and not self.quantize:
            return
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        if reason := next(filter(None, map(refuse, layers)), "" if layers or not self.has_experts else UNKNOWN):
            if self.quantize:
                raise ConfigError(f"quantize=fp8: {reason}. Leave quantize out.")
            assert self.layout is not None
            self.layout = replace(self.layout, dequantized=reason)
            return
        self.fp8 = Fp8(self._build_gemm(), stored, self.quantize)
        for module in list(model.modules()):
            if (kind := LINEAR.get(type(module))) is not None:
                module.__class__ = kind
                module.start(self.fp8, self.dtype, self.device)  # type: ignore[operator]
        for layer in layers:
            Fp8Experts.convert(layer, self.fp8, self.dtype, self.device)

    def after_loading(self, model: nn.Module) -> None:
        """Convert the MLPs and norms beside products in FP8, and log what was dequantised."""
        for module in list(model.modules()):
            if type(module) is GatedMLP and _any_fp8(module.gate_up_proj, module.down_proj):
                module.__class__ = Fp8MLP
            elif type(module) is AttentionLayer and _any_fp8(module.o_proj):
                module.__class__ = Fp8AttentionLayer
        for module in list(model.modules()):
            if isinstance(module, DecoderLayer):
                attention, mlp = module.self_attn, module.mlp
                if type(attention).forward in (AttentionLayer.forward, Fp8AttentionLayer.forward):
                    _quantise_result(module.input_layernorm, attention.qkv_proj)
                if type(mlp) is Fp8MLP:
                    _quantise_result(module.post_attention_layernorm, mlp.gate_up_proj)
        if self._checkpoint is not None and self._checkpoint.bytes_dequantized:
            self._report(self._checkpoint.bytes_dequantized)

    def prepare(self, model: nn.Module, rows: int) -> None:
        """Compile what the products of the loaded ``model`` need for 1 to ``rows`` rows: see `CompiledFp8Gemm`."""
        if self.fp8 is not None and isinstance(self.fp8.gemm, CompiledFp8Gemm):
            matrices = [module for module in model.modules() if isinstance(module, Fp8Matrix)]
            self.fp8.gemm.prepare([weight for matrix in matrices for weight in matrix.loaded], rows)

    def _report(self, stored: int) -> None:
        """Log the memory that weights need which ``stored`` bytes of e4m3 numbers were converted to."""
        assert self.layout is not None
        log.info(
            "%.3f GiB of weights in FP8 were dequantised to %s on this rank (%s): they take %.3f GiB",
            stored / 2**30,
            str(self.dtype).removeprefix("torch."),
            self.layout.dequantized or "a layer has weights in FP8 and others",
            stored * self.dtype.itemsize / 2**30,
        )


def _any_fp8(*products: nn.Module) -> bool:
    return any(isinstance(product, Fp8Linear) for product in products)


def _quantise_result(norm: nn.Module, product: nn.Module) -> None:
    """Let ``norm`` quantise its result where ``product``, to which the result goes, takes it."""
    if type(norm) is RMSNormFused and isinstance(product, Fp8Linear):
        norm.__class__ = Fp8NormFused
        norm.takes_quantized = product.takes_quantized  # type: ignore[assignment]
        prepare(norm.weight)
