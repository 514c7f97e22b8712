"""``moe=flashinfer``: FlashInfer's fused experts for Hopper GPUs, as grouped matrix products in CUTLASS.

FlashInfer sorts the (token, choice) pairs by expert, multiplies, applies the activation, multiplies again and adds up
by token. It has several hundred kernels for the products. A machine compiles them when it loads a layer for the first
time, which takes about ten CPU hours. The first call of a process measures which kernels are the fastest for each
number of tokens, up to 8,192. Later calls never make the host wait for the device. On an H100, ``moe=triton`` was
faster for each of six numbers of tokens: see docs/benchmarks/h200.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.plugins.moe import MoeBackend

ACTIVATIONS = {"silu": "Swiglu", "gelu": "Geglu", "gelu_pytorch_tanh": "GegluTanh"}
"""Hugging Face's ``hidden_act`` → the name of the gated activation in FlashInfer's ``ActivationType``."""


@dataclass
class FlashInfer:
    """FlashInfer's experts in CUTLASS; needs a Hopper GPU, and bfloat16 or float16."""

    autotune: bool = True
    """Measure the kernels of both products in the first call, which takes seconds. False: use FlashInfer's default."""
    fused_finalize: bool = False
    """Let the second product add up each token's rows, by atomic additions: results then differ from run to run."""

    def build(self, device: torch.device) -> MoeBackend:
        return FlashInferMoe(self, device)


class Experts(NamedTuple):
    """This rank's slice of the weights of some experts. FlashInfer numbers the experts from len(down)·ep_rank on.

    ``shift`` is what must be added to their global numbers for this.
    """

    up_gate: Tensor
    down: Tensor
    shift: int
    ep_rank: int
    act: Any


class FlashInferMoe:
    """The backend; see `minisgl.plugins.moe.MoeBackend` for shapes.

    Raises `ConfigError` on a CPU, and on a GPU that is not of the Hopper generation.
    """

    def __init__(self, config: FlashInfer, device: torch.device):
        if device.type != "cuda":
            raise ConfigError("this backend needs a CUDA device. On a CPU use moe=torch.")
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise ConfigError("this backend needs a Hopper GPU: use moe=triton.")
        import flashinfer
        from flashinfer.fused_moe import core

        self.config, self.flashinfer, self.core = config, flashinfer, core
        self.tuned: set[tuple[Any, ...]] = set()

    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Experts:
        """Copy ``gate_up`` with the up half first, because FlashInfer needs this order: see `MoeBackend.load`.

        Also compile and load FlashInfer's kernels: a later call may be recorded in a graph. Raises `ConfigError` for a
        dtype, a size or an activation that the kernels don't have.
        """
        dtype, (hidden, inner) = str(down.dtype).removeprefix("torch."), down.shape[1:]
        if dtype not in ("bfloat16", "float16"):
            raise ConfigError(f"moe=flashinfer can't serve dtype={dtype}: use dtype=bfloat16, or moe=triton.")
        if hidden % 8 or inner % 8:
            raise ConfigError(
                f"moe=flashinfer needs sizes that are multiples of 8, but the hidden size is {hidden}, and this rank's "
                f"slice of an expert has the inner size {inner}: use moe=triton."
            )
        act = getattr(self.flashinfer.ActivationType, ACTIVATIONS.get(activation, ""), None)
        if act is None:
            raise ConfigError(f"moe=flashinfer has no activation {activation!r}: use {', '.join(ACTIVATIONS)}.")
        self.core.get_cutlass_fused_moe_module("90")
        gate, up = gate_up.chunk(2, dim=1)
        ep_rank = -(-experts.start // len(experts))
        shift = ep_rank * len(experts) - experts.start
        return Experts(torch.cat((up, gate), dim=1), down.contiguous(), shift, ep_rank, act)

    @one_launch
    def forward(self, weights: Experts, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Sort, multiply twice and sum: see `MoeBackend.forward`.

        With ``autotune``, the first call for weights of a shape and a ``top_k`` measures kernels, unless it is recorded
        in a graph. It draws ``top_k`` different experts of ``ep_size`` ranks, so ``ep_size`` must be large enough.
        """
        up_gate, down, shift, ep_rank, act = weights
        kind = (up_gate.shape, x.dtype, act, ep_rank, ids.shape[1])
        tuned = not self.config.autotune or kind in self.tuned or torch.cuda.is_current_stream_capturing()
        with nullcontext() if tuned else self.flashinfer.autotune():
            self.core.cutlass_fused_moe(
                x,
                ids + shift if shift else ids,
                scale,
                up_gate,
                down,
                x.dtype,
                quant_scales=[],
                ep_size=max(ep_rank + 1, -(-ids.shape[1] // len(down))),
                ep_rank=ep_rank,
                output=out,
                activation_type=act,
                use_fused_finalize=self.config.fused_finalize,
            )
        if not tuned:
            self.tuned.add(kind)
        return out


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "moe", "flashinfer", FlashInfer
