"""The core's layers in a fixed order of sums: what ``kernels=exact`` builds.

A sum of floating-point numbers depends on the order of its summands. The fastest kernels choose the order by the number
of rows, so a row's bits depend on the rows beside it. Here each row has one order:

- A product is always computed by the C++ kernel that adds up one input after another (`linear.cpp`).
- A row-parallel product is computed in two halves of its inputs, which are rounded to the model's dtype and then added.
  With two ranks, each rank computes one half, and the all-reduce adds the same two numbers.
- Norms and SiLU are computed row by row in C++. `F.silu` and `torch.exp` of a whole tensor are not used, because their
  vector code and the scalar code for the last elements may round differently, and where the border is depends on the
  number of rows and threads.
- Sampling computes its exponentials and logarithms for one row and `BLOCK` tokens at a time, for the same reason.

He et al., Defeating Nondeterminism in LLM Inference, 2025, describes the cause and kernels for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.engine.gumbel import draw, gumbel
from minisgl.layers.attention import AttentionLayer, RMSNorm, RMSNormFused
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import GatedMLP, LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.models.converter import Kernels, convert
from minisgl.models.decoder import DecoderLayers
from minisgl.plugins.kernels.converted.cpu_layers import CpuDecoderLayers
from minisgl.plugins.kernels.converted.layers import use_huge_pages
from minisgl.plugins.kernels.exact import refuse_quantized
from minisgl.plugins.kernels.ops.cpp import decoder_layers, elementwise
from minisgl.plugins.kernels.ops.cpp import linear as cpp
from minisgl.plugins.kernels.ops.linear import PACKED_BYTES

if TYPE_CHECKING:
    from minisgl.distributed import Communicator
    from minisgl.engine.sampler import Sampler

__all__ = ["FixedOrderKernels", "Product", "log_sum_exp", "silu_and_mul", "two_halves"]

BLOCK = 16_384
"""Elements of a row of logits whose exponentials torch computes at a time: few enough that torch uses one thread."""


class Product:
    """x·weightᵀ + bias in one order of sums. ``weight`` is [out, in], float32 or bfloat16.

    Raises `ConfigError` for a size that the C++ kernel can't multiply. Outputs are padded. A small weight in float32 is
    packed, as `minisgl.plugins.kernels.ops.linear.pack` does; the order is the same.
    """

    def __init__(self, weight: Tensor, name: str):
        self._out_size = len(weight)
        self._padding = -len(weight) % cpp.MULTIPLE
        weight, self._dtype = weight.detach().contiguous(), weight.dtype
        if self._padding:
            weight = nn.functional.pad(weight, (0, 0, 0, self._padding))
        if not cpp.serves(weight):
            raise ConfigError(
                f"exact=true can't multiply with {name}, {list(weight.shape)} in {weight.dtype}: the number of inputs "
                f"must be a multiple of {cpp.MULTIPLE}, and the dtype float32 or bfloat16."
            )
        packed = weight.dtype == torch.float32 and weight.nbytes <= PACKED_BYTES
        self._panels = cpp.pack(weight) if packed else None
        self._weight = None if packed else weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [rows, in]; returns [rows, out]."""
        if self._padding and bias is not None:
            bias = nn.functional.pad(bias, (0, self._padding))
        if self._panels is not None:
            y: Tensor = cpp.packed_linear(x, self._panels, self._out_size + self._padding, bias)
        else:
            assert self._weight is not None
            y = cpp.ordered_linear(x, self._weight, bias)
        return y[:, : self._out_size].contiguous() if self._padding else y

    def in_cpp(self, bias: Tensor | None) -> decoder_layers.Product | None:
        """Return the same product for `decoder_layers.forward`, or None if outputs are padded."""
        if self._padding:
            return None
        return decoder_layers.ordered_product(self._weight, self._panels, bias, self._dtype)


def two_halves(weight: Tensor, ranks: int, name: str) -> list[Product]:
    """Return the products of a weight [out, in] that is split by its inputs: two with one rank, one with two ranks."""
    if ranks > 2:
        raise ConfigError(f"exact=true needs tp=1 or tp=2: with tp={ranks}, sums over the ranks have another order.")
    return [Product(part, name) for part in weight.chunk(2 // ranks, dim=1)]


def multiply_halves(products: list[Product], x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [rows, in] with the result of `two_halves`. The bias belongs to the first half."""
    first, *rest = (product(part, bias if i == 0 else None) for i, (product, part) in enumerate(_parts(products, x)))
    for other in rest:
        first += other
    return first


def _parts(products: list[Product], x: Tensor) -> list[tuple[Product, Tensor]]:
    return list(zip(products, x.chunk(len(products), dim=1), strict=True))


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate)·up [rows, dim] for x [rows, 2·dim]; dim is a multiple of 16."""
    return elementwise.silu_and_mul(x.contiguous())


# ---- layers --------------------------------------------------------------------------------------


class ExactColParallelMerged(LinearColParallelMerged):
    """`LinearColParallelMerged` in a fixed order."""

    product: Product

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in] with all parts: see `LinearColParallelMerged`."""
        return self.product(x, self.bias)


class ExactQKVMerged(LinearQKVMerged):
    """`LinearQKVMerged` in a fixed order."""

    product: Product

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in] with all parts: see `LinearQKVMerged`."""
        return self.product(x, self.bias)


class ExactRowParallel(LinearRowParallel):
    """`LinearRowParallel` as the sum of two halves."""

    products: list[Product]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in / size]: see `LinearRowParallel`."""
        y = multiply_halves(self.products, x, self.bias if self.comm.rank == 0 else None)
        return self.comm.all_reduce(y) if self.reduce else y


class ExactLMHead(ParallelLMHead):
    """`ParallelLMHead` in a fixed order."""

    rows_product: Product

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, rows of this rank]."""
        return self.rows_product(hidden)


class ExactNorm(RMSNorm):
    """`RMSNorm` in a fixed order."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        rows = x.reshape(-1, x.shape[-1])
        return elementwise.rms_norm(rows, self.weight, self.eps).view(x.shape)


class ExactNormFused(RMSNormFused):
    """`RMSNormFused` in a fixed order."""

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``: see `RMSNormFused`."""
        if residual is None:
            return elementwise.rms_norm(x.contiguous(), self.weight, self.eps), x
        if self.comm is not None:
            x = self.comm.all_reduce(x)
        return elementwise.add_rms_norm(x, residual.contiguous(), self.weight, self.eps)


class ExactMLP(GatedMLP):
    """`GatedMLP` in a fixed order."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out


class ExactExperts(NamedTuple):
    """The products of one expert: gate and up, and the halves of down."""

    gate_up: Product
    down: list[Product]


class ExactMoE:
    """The routing and the experts of an MoE layer in a fixed order: a base of the class that the layer gets.

    A token's experts are added up in the order of its choices: first for one half of the experts' inner dimension, then
    for the other half, and then the two sums. With two ranks, each rank computes one of them.
    """

    gate_product: Product
    top_k: int
    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    experts: list[ExactExperts]
    comm: Communicator
    reduce: bool

    def router_logits(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, hidden] with the router's weight: see `minisgl.plugins.models.experts.MoELayer`."""
        return self.gate_product(x)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x [tokens, hidden]: see `minisgl.plugins.models.experts.MoELayer.forward`."""
        ids, scale = self.route(x)
        chosen = ids.flatten()
        order = chosen.argsort(stable=True)
        halves = len(self.experts[0].down)
        outputs = [x.new_empty(len(chosen), x.shape[1]) for _ in range(halves)]  # of each (token, choice)
        for expert, pairs in zip(self.experts, order.split(self._counts(chosen)), strict=True):
            if len(pairs):
                inner = silu_and_mul(expert.gate_up(x[pairs // self.top_k]))
                for out, (product, part) in zip(outputs, _parts(expert.down, inner), strict=True):
                    out[pairs] = product(part)
        sums = [self._sum(out.view(*ids.shape, -1), scale.to(x.dtype)) for out in outputs]
        y = sums[0] if halves == 1 else sums[0].add_(sums[1])
        return self.comm.all_reduce(y) if self.reduce else y

    def _counts(self, chosen: Tensor) -> list[int]:
        counts: list[int] = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        return counts

    def _sum(self, outputs: Tensor, scale: Tensor) -> Tensor:
        """Return the sums over the choices: outputs [tokens, choices, hidden], scale [tokens, choices]."""
        total = outputs[:, 0] * scale[:, :1]
        for choice in range(1, outputs.shape[1]):
            total += outputs[:, choice] * scale[:, choice, None]
        return total


def convert_experts(layer: Any, name: str) -> None:
    """Convert an MoE layer (`minisgl.plugins.models.experts.MoELayer`) whose experts ``moe=torch`` has loaded."""
    weights: list[Any] = [getattr(layer.experts, part, None) for part in ("gate_up", "down")]
    if not all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights):
        raise ConfigError(
            "exact=true computes the experts itself, from the weights that moe=torch has loaded: use moe=torch."
        )
    if layer.act != "silu":
        raise ConfigError(f"exact=true computes the activation silu, not {layer.act} ({name}).")
    layer.__class__ = type("ExactMoE", (ExactMoE, type(layer)), {})
    layer.gate_product = Product(layer.gate, f"{name}.gate")
    layer.experts = [
        ExactExperts(Product(gate_up, f"{name}.experts"), two_halves(down, layer.comm.size, f"{name}.experts"))
        for gate_up, down in zip(*weights, strict=True)
    ]


CLASSES: Mapping[type, type] = MappingProxyType(
    {
        LinearColParallelMerged: ExactColParallelMerged,
        LinearQKVMerged: ExactQKVMerged,
        LinearRowParallel: ExactRowParallel,
        ParallelLMHead: ExactLMHead,
        RMSNorm: ExactNorm,
        RMSNormFused: ExactNormFused,
        GatedMLP: ExactMLP,
    }
)
"""Plain class → the class of a converted module."""
KNOWN = (*CLASSES.values(), VocabParallelEmbedding, AttentionLayer)


def _product_in_cpp(layer: Any) -> decoder_layers.Product | None:
    product: Product = layer.product
    return product.in_cpp(layer.bias)


def _halves_in_cpp(layer: Any) -> decoder_layers.Product | None:
    halves = [half.in_cpp(None if i else layer.bias) for i, half in enumerate(layer.products)]
    if len(halves) != 2 or halves[0] is None or halves[1] is None:
        return None
    return decoder_layers.halves_product(halves[0], halves[1])


decoder_layers.PRODUCTS.update(dict.fromkeys((ExactColParallelMerged, ExactQKVMerged), _product_in_cpp))
decoder_layers.PRODUCTS[ExactRowParallel] = _halves_in_cpp
decoder_layers.PARTS.update((ExactMLP, ExactNormFused))


class FixedOrderKernels(Kernels):
    """Converts all layers and the sampler. Refuses a model with layers that are not the core's."""

    def before_loading(self, model: nn.Module) -> None:
        """Put large weights in huge pages."""
        use_huge_pages(model)

    def after_loading(self, model: nn.Module) -> None:
        """Convert the layers. Raises `ConfigError` for a layer whose order of sums is not known."""
        refuse_quantized(model)
        convert(model, {**CLASSES, DecoderLayers: CpuDecoderLayers})
        for name, module in model.named_modules():
            kind = type(module)
            if vars(kind).get("softmax_routing"):  # not inherited: a subclass may route otherwise
                convert_experts(module, name)
            elif kind not in KNOWN and (
                isinstance(module, KNOWN) or next(module.parameters(recurse=False), None) is not None
            ):
                raise ConfigError(f"exact=true does not know the order of sums of {kind.__name__} ({name}).")
            elif kind in (ExactColParallelMerged, ExactQKVMerged):
                module.product = Product(module.weight, name)
            elif kind is ExactLMHead:
                module.rows_product = Product(module.weight, name)
            elif isinstance(module, ExactRowParallel):
                module.products = two_halves(module.weight, module.comm.size, name)
            elif isinstance(module, ExactMLP) and module.act_name != "silu":
                raise ConfigError(f"exact=true computes the activation silu, not {module.act_name} ({name}).")
            elif isinstance(module, RMSNorm) and not elementwise.serves(module.weight[None], len(module.weight)):
                raise ConfigError(
                    f"exact=true can't normalise rows of {len(module.weight)} ({name}): use a multiple of 16."
                )

    def convert_sampler(self, sampler: Sampler) -> None:
        """Compute what has exponentials and logarithms row by row."""
        sampler.draw, sampler.log_sum_exp = partial(draw, noise=noise_of_rows), log_sum_exp


# ---- sampling --------------------------------------------------------------------------------------


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row: float32 [rows, vocab] → [rows, 1]."""
    rows = []
    for row in logits:
        parts = [block.clone().logsumexp(dim=0, keepdim=True) for block in row.split(BLOCK)]
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts).logsumexp(dim=0, keepdim=True))
    return torch.stack(rows) if rows else logits.new_empty(0, 1)


def noise_of_rows(keys: Tensor, positions: Tensor, hashes: Tensor) -> Tensor:
    """Return Gumbel noise, float32 [rows, vocab]: see `minisgl.engine.gumbel.gumbel`."""
    blocks = [block.clone() for block in hashes.split(BLOCK)]
    rows = [
        torch.cat([gumbel(keys[i : i + 1], positions[i : i + 1], block) for block in blocks], dim=1)
        for i in range(len(keys))
    ]
    return torch.cat(rows) if rows else keys.new_empty(0, len(hashes), dtype=torch.float32)
