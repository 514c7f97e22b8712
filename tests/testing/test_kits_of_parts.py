"""The kits for experts, communicators and models, judged: each finds what is wrong with a wrong one, and says where."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.distributed import Communicator
from minisgl.plugins.communicator.ring import Ring, RingCommunicator
from minisgl.plugins.models.qwen3_plain import MLP, Attention, Block, Qwen3Plain
from minisgl.plugins.moe.grouped import GroupedMoe
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.model import ModelConformance
from minisgl.testing.moe import MoeConformance


def failures(kit: Any) -> dict[str, str]:
    """Test → message of all that fail."""
    failed = {}
    for name in sorted(each for each in dir(kit) if each.startswith("test_")):
        try:
            getattr(type(kit)(), name)()
        except Exception as error:
            failed[name] = str(error)
    return failed


# ---- experts ---------------------------------------------------------------------------------------------


class Overwrites(GroupedMoe):
    def scatter(self, rows: Tensor, pairs: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        out.zero_()[pairs // scale.shape[1]] = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out


class MakesItsOwn(GroupedMoe):
    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        return super().forward(weights, x, ids, scale, torch.empty_like(out))


class TakesAllForItsOwn(GroupedMoe):
    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Any:
        return super().load(gate_up, down, range(len(down)), activation)


class Remembers(GroupedMoe):
    last: Tensor | float = 0.0

    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        out = super().forward(weights, x, ids, scale, out).add_(1e-6 * self.last)
        self.last = out[0].clone()
        return out


class ChangesItsInputs(GroupedMoe):
    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        out = super().forward(weights, x, ids, scale, out)
        scale.zero_()
        return out


@pytest.mark.parametrize(
    ("wrong", "test", "says"),
    [
        (Overwrites, "test_the_sum_of_the_chosen_experts", r"1 tokens, top 2 of 6 experts.*: token 0, which chose"),
        (MakesItsOwn, "test_it_writes_into_out_and_leaves_its_inputs", "the result is not in `out`"),
        (TakesAllForItsOwn, "test_ranges_of_experts_add_up", "add up to something else"),
        (Remembers, "test_a_call_does_not_remember_the_one_before", "after a different one"),
        (ChangesItsInputs, "test_it_writes_into_out_and_leaves_its_inputs", "forward changed scale"),
    ],
)
def test_the_expert_kit_finds(wrong: type[GroupedMoe], test: str, says: str) -> None:
    class Kit(MoeConformance):
        def make(self) -> GroupedMoe:
            return wrong(16)

    found = failures(Kit())
    assert test in found, found
    assert re.search(says, found[test]), found[test]


# ---- communicators -----------------------------------------------------------------------------------------


class LosesTheTail(RingCommunicator):
    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        whole = x.contiguous()
        each = whole.numel() // self.size
        chunks = [whole.view(-1)[i * each : (i + 1) * each] for i in range(self.size)]
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole


class AddsInItsOwnOrder(RingCommunicator):
    def all_reduce(self, x: Tensor) -> Tensor:
        passing, total = x.contiguous().clone(), x.contiguous().clone()
        for _ in range(self.size - 1):
            arrived = torch.empty_like(passing)
            self.swap(passing, arrived)
            total += arrived
            passing = arrived
        return total


class GathersInAnyOrder(RingCommunicator):
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        parts = super().all_gather(x, dim).chunk(self.size, dim)
        return torch.cat([*parts[self.rank :], *parts[: self.rank]], dim)


class AddsTheResidualOnEveryRank(RingCommunicator):
    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self.all_reduce(x + residual)
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total


class WaitsForEver(RingCommunicator):
    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        self.send(outgoing, (self.rank + 1) % self.size).wait()
        self.receive(incoming, (self.rank - 1) % self.size).wait()


@pytest.mark.parametrize(
    ("wrong", "test", "says"),
    [
        (LosesTheTail, "test_all_reduce_is_the_sum", r"\[1\] of float32 on 2 ranks: rank 0 got .*, not the sum"),
        (AddsInItsOwnOrder, "test_all_reduce_gives_every_rank_the_same_bits", "3 ranks: .* are not rank 0's"),
        (GathersInAnyOrder, "test_all_gather_keeps_the_order_of_the_ranks", "all_gather on 2 ranks"),
        (AddsTheResidualOnEveryRank, "test_all_reduce_norm_adds_the_residual_once", "all_reduce_norm: the norm"),
        (WaitsForEver, "test_all_reduce_is_the_sum", r"wait for each other for ever.*rank 0 at test_kits_of_parts\.py"),
    ],
)
def test_the_communicator_kit_finds(wrong: type[RingCommunicator], test: str, says: str) -> None:
    class Kit(CommunicatorConformance):
        limit = 2.0

        def make(self, rank: int, size: int, address: str) -> Communicator:
            return wrong(Ring(timeout=30), rank, size, address, torch.device("cpu"))

    with pytest.raises(AssertionError, match=says):
        getattr(Kit(), test)()


# ---- models ------------------------------------------------------------------------------------------------


def forgets_the_norms(block: Block) -> None:
    block.self_attn.q_norm.weight = block.self_attn.k_norm.weight


def cuts_nothing(block: Block) -> None:
    ctx = block.self_attn.ctx
    alone = replace(ctx, comm=SimpleNamespace(rank=0, size=1))
    block.mlp, block.self_attn = MLP(CONFIG[0], alone), Attention(block.self_attn.spec.index, CONFIG[0], alone)
    block.self_attn.ctx = ctx


def leaves_parts(block: Block) -> None:
    block.mlp.down_proj.reduce = False


def sees_one_token(block: Block) -> None:
    block.self_attn.spec = replace(block.self_attn.spec, window=1)


CONFIG: list[Any] = []


@pytest.mark.parametrize(
    ("change", "test", "says"),
    [
        (forgets_the_norms, "test_logits_are_transformers", "a whole prompt: the logits of position 1 are off by"),
        (cuts_nothing, "test_ranks_agree_with_one_and_read_only_their_part", "rank 0 of 2 read .*: what did it cut"),
        (leaves_parts, "test_ranks_agree_with_one_and_read_only_their_part", "rank 0 of 2: the logits of position"),
        (sees_one_token, "test_chunks_pages_and_neighbours_do_not_matter", "page_size=1, a chunk: .* of position 1"),
    ],
)
def test_the_model_kit_finds(change: Callable[[Block], None], test: str, says: str) -> None:
    class Wrong(Qwen3Plain):
        def block(self, index: int) -> Any:
            CONFIG[:] = [self.config]
            made = super().block(index)
            change(made)  # type: ignore[arg-type]
            return made

    class Kit(ModelConformance):
        architecture = "qwen3"

        def make(self) -> type:
            return Wrong

    with pytest.raises(AssertionError, match=says):
        getattr(Kit(), test)()
