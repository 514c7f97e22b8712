"""A mixture-of-experts (MoE) layer: it routes each token to experts and sums the experts' outputs.

The layer computes the routing: the top-k expert ids and weights of each token (SGLang: `select_experts`). The part of
the group ``moe`` (`minisgl.plugins.moe.MoeBackend`) computes the experts. Every rank routes every token and holds a
slice of each expert's inner dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard, split_rows

if TYPE_CHECKING:
    from minisgl.plugins.moe import MoeBackend


class MoELayer(nn.Module):
    """A router and its experts (Shazeer et al., Outrageously Large Neural Networks, 2017).

    The router takes the softmax over all experts in float32 and chooses the ``top_k`` most probable ones;
    ``renormalize`` scales their weights to sum to 1. With ``reduce`` the layer all-reduces its output over the ranks;
    without it the output is a partial sum, which the caller must reduce.
    """

    softmax_routing: ClassVar[bool] = True
    """Kernels may replace `route` of this class: `minisgl.plugins.kernels.converted.layers.FastRouting`."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        top_k: int,
        act: str,
        ctx: Context,
        *,
        renormalize: bool,
        reduce: bool = False,
    ):
        super().__init__()
        self.moe: MoeBackend = ctx.part("moe")
        self.comm, self.reduce = ctx.comm, reduce and ctx.comm.size > 1
        self.inner_size, self.num_experts, self.top_k, self.act = inner_size, num_experts, top_k, act
        self.renormalize = renormalize
        self.silenced: int | None = None
        """The number of an expert whose down projection is set to zeros after loading, so that it contributes nothing.

        None: no expert is silenced. Must be set before the weights are loaded: see `plugins/models/moe_options.py`.
        """
        inner = split_rows(inner_size, ctx.comm.size, "expert size (moe_intermediate_size)")
        self.gate = ctx.parameter(num_experts, hidden_size)
        self.gate_up: nn.Parameter | None = ctx.parameter(num_experts, 2 * inner, hidden_size)
        self.down: nn.Parameter | None = ctx.parameter(num_experts, hidden_size, inner)
        self.experts: Any = None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the router's weight and this rank's slice of every expert."""
        yield WeightShard.whole(f"{prefix}gate.weight", self.gate)
        yield from self.expert_shards(prefix, names)

    def expert_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's slice of every expert.

        Checkpoints store the experts separately (``experts.7.up_proj.weight``) or stacked, as transformers 5 does
        (``experts.gate_up_proj`` [experts, 2·inner, hidden]). ``names`` says which layout the source has.
        """
        assert self.gate_up is not None
        assert self.down is not None
        experts, hidden, here = self.down.shape
        inner, start = self.inner_size, self.comm.rank * here
        gate, up = self.gate_up[:, :here], self.gate_up[:, here:]
        if names is None or f"{prefix}experts.gate_up_proj" in names:
            both = (experts, 2 * inner, hidden)
            yield WeightShard.part(f"{prefix}experts.gate_up_proj", both, 1, start, gate)
            yield WeightShard.part(f"{prefix}experts.gate_up_proj", both, 1, inner + start, up)
            yield WeightShard.part(f"{prefix}experts.down_proj", (experts, hidden, inner), 2, start, self.down)
            return
        for e in range(experts):
            yield WeightShard.part(f"{prefix}experts.{e}.gate_proj.weight", (inner, hidden), 0, start, gate[e])
            yield WeightShard.part(f"{prefix}experts.{e}.up_proj.weight", (inner, hidden), 0, start, up[e])
            yield WeightShard.part(f"{prefix}experts.{e}.down_proj.weight", (hidden, inner), 1, start, self.down[e])

    def after_load(self) -> None:
        """Pass the experts' weights to the MoE backend, which may convert them, and drop the layer's own references."""
        assert self.gate_up is not None
        assert self.down is not None
        if self.silenced is not None:
            self.down[self.silenced] = 0
        self.experts = self.moe.load(self.gate_up, self.down, range(self.num_experts), self.act)
        self.gate_up = self.down = None

    def router_logits(self, x: Tensor) -> Tensor:
        """Return the router's scores of all experts, [tokens, num_experts], for x [tokens, hidden]."""
        return F.linear(x, self.gate)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route x [tokens, hidden]: return expert numbers, int32, and weights, float32, both [tokens, top_k]."""
        weights, ids = self.router_logits(x).softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids.int(), weights

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x [tokens, hidden]; returns [tokens, hidden], a partial sum unless ``reduce`` is set."""
        ids, scale = self.route(x)
        out = self.moe.forward(self.experts, x, ids, scale, torch.empty_like(x))
        return self.comm.all_reduce(out) if self.reduce else out
