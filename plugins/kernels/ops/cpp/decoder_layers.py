"""All decoder layers of a step on a CPU, in one call of C++ (`decoder_layers.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minisgl.plugins.kernels.ops.cpp.linear import compiled, rows, serves
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from minisgl.attention import AttnBatch
    from minisgl.kvcache.pool import KVPool
    from minisgl.plugins.kernels.ops.grouped import GroupedWeight
    from minisgl.plugins.kernels.ops.linear import Packed

__all__ = [
    "MAX_TOKENS",
    "PARTS",
    "PRODUCTS",
    "Product",
    "forward",
    "grouped_product",
    "halves_product",
    "make",
    "ordered_product",
    "plain_product",
]

MAX_TOKENS = 64
"""With more tokens than this, the calls from Python are a small part of a step."""


class Product(NamedTuple):
    """The product of a linear layer: ``function`` is of C++, and called by C++, for at most ``max_tokens`` rows."""

    function: Any
    max_tokens: int = MAX_TOKENS


PRODUCTS: dict[type, Callable[[Any], Product | None]] = {}
"""Class of a linear layer → makes a layer's product for C++; None: it has none. Exactly these classes are computed in
C++: a subclass may compute something else."""


PARTS: set[type] = set()
"""Classes of a layer's norms and MLP that compute what C++ computes for them. A subclass may compute something else."""


def grouped_product(matrices: Sequence[GroupedWeight], bias: Tensor | None, dtype: torch.dtype) -> Product:
    """Return the product with ``matrices``, whose outputs are side by side. ``dtype`` is that of activations."""
    forms = [[*map(int, matrix.form), matrix.outputs] for matrix in matrices]
    return Product(compiled().grouped_product([matrix.panels for matrix in matrices], forms, _or_empty(bias, dtype)))


def plain_product(weight: Tensor, packed: Packed | None, bias: Tensor | None) -> Product | None:
    """Return the product with ``weight`` [out, in], or with its packed copy where that is faster."""
    if not serves(weight):
        return None
    panels, first = (weight.new_empty((0, 0, 0)), 0) if packed is None else (packed.weight, packed.rows.start)
    few, most = rows().in_place[weight.dtype], min(MAX_TOKENS, rows().served[weight.dtype])
    function = compiled().plain_product(weight.detach(), panels, _or_empty(bias, weight.dtype), first, few)
    return Product(function, most)


def ordered_product(weight: Tensor | None, panels: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """Return the product in the order of `minisgl.plugins.kernels.ops.cpp.linear.ordered_linear`, for any rows.

    Give either ``weight`` [out, in] or ``panels``, the result of `pack` for it. ``dtype`` is that of activations.
    """
    matrix = torch.empty((0, 0), dtype=dtype) if weight is None else weight
    packed = torch.empty((0, 0, 0), dtype=dtype) if panels is None else panels
    return Product(compiled().plain_product(matrix, packed, _or_empty(bias, dtype), 1, 0))


def halves_product(first: Product, second: Product) -> Product:
    """Return the sum of two products, one for each half of the inputs; each is rounded to the dtype of the result."""
    return Product(compiled().halves_product(first.function, second.function))


def _or_empty(bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype) if bias is None else bias.detach()


def make(layers: Sequence[Any], pool: KVPool) -> Product | None:
    """Return a function for `forward` that computes the converted ``layers`` with the KV in ``pool``, or None."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    products: list[Product] = []
    none = torch.empty(0, dtype=pool.dtype)
    for layer in layers:
        attention, mlp, spec = layer.self_attn, layer.mlp, layer.self_attn.spec
        for module in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            product = PRODUCTS[type(module)](module)
            if product is None:
                return None
            products.append(product)
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        q_norm, k_norm, eps = (none, none, 0.0) if attention.norm is None else attention.norm
        sinks = torch.empty(0) if spec.sinks is None else spec.sinks.float()
        tensors += [before.weight, after.weight, q_norm, k_norm, sinks, *pool.layer(spec.index)]
        numbers += [before.eps, after.eps, eps, spec.scale, spec.soft_cap, float(spec.window)]
    functions, q_heads = [product.function for product in products], layers[0].self_attn.spec.q_heads
    tensors = [tensor.detach() for tensor in tensors]
    function = compiled().decoder_layers(tensors, numbers, functions, q_heads, inner_size(layers[0]))
    return Product(function, min(product.max_tokens for product in products))


def inner_size(layer: Any) -> int:
    """Return the number of columns between the two products of a layer's MLP."""
    (_, _, _, gate), (_, _, _, up) = layer.mlp.gate_up_proj.parts
    assert gate == up
    return int(gate)


@one_launch
def forward(function: Any, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor, backend: Any) -> tuple[Tensor, Tensor]:
    """Compute all layers of x [tokens, hidden], which becomes the residual stream: see `DecoderLayers.forward`.

    ``function`` is that of a result of `make`. ``backend.planned_in_cpp()`` returns the rows of the step.
    """
    batch: AttnBatch = backend.planned_in_cpp()
    out = torch.empty_like(x)
    rows = (batch.page_table, batch.req_pool_indices, batch.seq_lens, batch.cu_seqlens_q)
    function(x, out, cos_sin, out_cache_loc, *rows, torch.get_num_threads())
    return out, x
