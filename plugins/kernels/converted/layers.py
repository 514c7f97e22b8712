"""The core's layers with the functions of `minisgl.plugins.kernels.ops`, which choose a kernel by device and shape.

`convert_layers` gives a module one of these classes if its own class is exactly the plain one. So a layer that a plugin
put in its place still computes what the plugin says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minisgl.distributed import Communicator
from minisgl.layers.attention import RMSNorm, RMSNormFused
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import GatedMLP, LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.models.converter import convert
from minisgl.plugins.kernels.ops import huge_pages
from minisgl.plugins.kernels.ops.activation import ACTS, act_and_mul
from minisgl.plugins.kernels.ops.cpp import decoder_layers as cpp
from minisgl.plugins.kernels.ops.gated import gated_linear
from minisgl.plugins.kernels.ops.linear import Packed, linear, pack
from minisgl.plugins.kernels.ops.norm import add_rms_norm, prepare, rms_norm
from minisgl.plugins.kernels.ops.routing import softmax_topk

__all__ = [
    "CLASSES",
    "FastColParallelMerged",
    "FastMLP",
    "FastNorm",
    "FastNormFused",
    "FastQKVMerged",
    "FastRouting",
    "FastRowParallel",
    "convert_layers",
    "use_huge_pages",
]

CPU_ROWS = 1024
"""The most tokens whose MLP a CPU computes at a time, so that the gate-and-up results stay in its cache. Without the
limit, a step of 8192 tokens spent a fifth of its time on first-touch allocation of memory for these activations.
"""


class FastColParallelMerged(LinearColParallelMerged):
    """`LinearColParallelMerged` with the fastest product. ``packed`` is a copy of the weight for few rows on a CPU."""

    packed: Packed | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] with all parts: see `LinearColParallelMerged`."""
        return linear(x, self.weight, self.bias, self.packed)


class FastQKVMerged(LinearQKVMerged):
    """`LinearQKVMerged` with the fastest product."""

    packed: Packed | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] with all parts: see `LinearQKVMerged`."""
        return linear(x, self.weight, self.bias, self.packed)


class FastRowParallel(LinearRowParallel):
    """`LinearRowParallel` with the fastest product."""

    packed: Packed | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in / size]; returns [tokens, out], a partial sum unless the layer has ``reduce``."""
        y = linear(x, self.weight, self.bias if self.comm.rank == 0 else None, self.packed)
        return self.comm.all_reduce(y) if self.reduce else y


class FastLMHead(ParallelLMHead):
    """`ParallelLMHead` with the fastest product."""

    packed: Packed | None

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, rows of this rank]."""
        return linear(hidden, self.weight, packed=self.packed)


class FastNorm(RMSNorm):
    """`RMSNorm` in one launch."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        return rms_norm(x, self.weight, self.eps)


class FastZeroCentredNorm:
    """A norm that multiplies by 1 + weight in one launch: a base of the class that the layer gets, on a GPU.

    The layer's own class says with ``zero_centred`` that it computes what `minisgl.plugins.models.gemma3.GemmaNorm`
    computes. ``factors`` are 1 + weight, float32.
    """

    factors: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        return rms_norm(x if x.is_contiguous() or x.dim() == 2 else x.contiguous(), self.factors, self.eps)


class FastNormFused(RMSNormFused):
    """`RMSNormFused` in one launch, the all-reduce included if the communicator can."""

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``: see `RMSNormFused`."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        if self.comm is not None:
            if type(self.comm).all_reduce_norm is not Communicator.all_reduce_norm:
                return self.comm.all_reduce_norm(x, residual, self.weight, self.eps)
            x = self.comm.all_reduce(x)
        return add_rms_norm(x, residual, self.weight, self.eps)


class FastMLP(GatedMLP):
    """`GatedMLP` with the product and the activation in one launch, where that is faster."""

    def forward(self, x: Any) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        if isinstance(x, Tensor) and x.device.type == "cpu" and len(x) > CPU_ROWS:
            return torch.cat([self.forward(rows) for rows in x.split(CPU_ROWS)])
        out: Tensor = self.down_proj(self.inner(x))
        return out

    def inner(self, x: Any) -> Any:
        """Return act(gate(x))·up(x), which the down projection takes."""
        merged, act = self.gate_up_proj, ACTS[self.act_name]
        if merged.bias is None and type(merged) is FastColParallelMerged:
            gated = gated_linear(x, merged.weight, act)
            if gated is not None:
                return gated
        return act_and_mul(merged(x), act)


class FastRouting:
    """The routing of an MoE layer in two launches: a base of the class that the layer gets.

    The layer's own class says with ``softmax_routing`` that it routes as `minisgl.plugins.models.experts.MoELayer`.
    """

    gate: nn.Parameter
    top_k: int
    renormalize: bool
    moe: Any
    experts: Any

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route x [tokens, hidden]: see `minisgl.plugins.models.experts.MoELayer.route`."""
        return softmax_topk(linear(x, self.gate), self.top_k, self.renormalize)


PRODUCTS: dict[type, type] = {
    LinearColParallelMerged: FastColParallelMerged,
    LinearQKVMerged: FastQKVMerged,
    LinearRowParallel: FastRowParallel,
    ParallelLMHead: FastLMHead,
}
CLASSES = PRODUCTS | {RMSNorm: FastNorm, RMSNormFused: FastNormFused, GatedMLP: FastMLP}
"""Plain class → the class of a converted module."""


def _product_in_cpp(layer: Any) -> cpp.Product | None:
    return cpp.plain_product(layer.weight, layer.packed, layer.bias)


cpp.PRODUCTS.update(dict.fromkeys((FastColParallelMerged, FastQKVMerged, FastRowParallel), _product_in_cpp))
cpp.PARTS.update((FastMLP, FastNormFused))


def convert_layers(model: nn.Module) -> None:
    """Convert the layers of a loaded ``model``. On a CPU, compile what their first step needs, and pack weights."""
    convert(model, CLASSES)
    products = tuple(PRODUCTS.values())
    for module in model.modules():
        kind = type(module)
        if vars(kind).get("softmax_routing"):  # not inherited: a subclass may route otherwise
            module.__class__ = type("FastMoE", (FastRouting, kind), {})
        if vars(kind).get("zero_centred") and module.weight.is_cuda:
            module.factors = 1 + module.weight.float()  # type: ignore[operator, assignment]
            module.__class__ = type("FastZeroCentredNorm", (FastZeroCentredNorm, kind), {})
        if type(module) in products:
            module.packed = pack(module.weight)  # type: ignore[arg-type, assignment]
        elif type(module) in (FastNorm, FastNormFused):
            prepare(module.weight)  # type: ignore[arg-type]


def use_huge_pages(model: nn.Module) -> None:
    """Put the large weights of products and of the embedding on a CPU in huge pages, before they are loaded."""
    kinds = (*PRODUCTS, VocabParallelEmbedding)
    weights = {id(m.weight): m.weight for m in model.modules() if type(m) in kinds}
    for weight in weights.values():
        assert isinstance(weight, nn.Parameter)
        if weight.device.type == "cpu" and weight.nbytes >= huge_pages.HUGE_PAGE:
            weight.data = huge_pages.empty(weight.shape, weight.dtype, weight.device)  # zeros, until it is written
