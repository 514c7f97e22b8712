"""Tests of the kits for MoE backends, communicators and models: they find faulty plugins and say what is wrong."""

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
    """Run all tests of a kit. Return the message of each failed test by the test's name."""
    failed = {}
    for name in sorted(each for each in dir(kit) if each.startswith("test_")):
        try:
            getattr(type(kit)(), name)()
        except Exception as error:
            failed[name] = str(error)
    return failed


# ---- experts ---------------------------------------------------------------------------------------------


class Overwrites(GroupedMoe):
    """Overwrites the contributions of a token's earlier choices."""

    def scatter(self, rows: Tensor, pairs: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real]
        out.zero_()[pairs // scale.shape[1]] = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out


class IgnoresOut(GroupedMoe):
    """Writes the result into a new tensor instead of ``out``."""

    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        return super().forward(weights, x, ids, scale, torch.empty_like(out))


class IgnoresRange(GroupedMoe):
    """Treats the local experts as the experts from number 0 on."""

    def load(self, gate_up: Tensor, down: Tensor, experts: range, activation: str) -> Any:
        return super().load(gate_up, down, range(len(down)), activation)


class Remembers(GroupedMoe):
    """Adds a part of the previous result."""

    last: Tensor | float = 0.0

    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        out = super().forward(weights, x, ids, scale, out).add_(1e-6 * self.last)
        self.last = out[0].clone()
        return out


class ChangesInputs(GroupedMoe):
    """Sets the routing weights to zero."""

    def forward(self, weights: Any, x: Tensor, ids: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        out = super().forward(weights, x, ids, scale, out)
        scale.zero_()
        return out


@pytest.mark.parametrize(
    ("wrong", "test", "says"),
    [
        (Overwrites, "test_chosen_experts", r"1 token, top 2 of 6 experts.*: the result of token 0, which chose"),
        (IgnoresOut, "test_out_and_inputs", "the result is not in `out`"),
        (IgnoresRange, "test_expert_ranges", "three ranks with different experts is off by"),
        (Remembers, "test_no_state_between_calls", "after a call with other tokens"),
        (ChangesInputs, "test_out_and_inputs", "forward changed scale"),
    ],
)
def test_faulty_moe_backends(wrong: type[GroupedMoe], test: str, says: str) -> None:
    """The MoE kit finds each faulty backend, in the expected test and with the expected message."""

    class Kit(MoeConformance):
        def make(self) -> GroupedMoe:
            return wrong(16)

    found = failures(Kit())
    assert test in found, found
    assert re.search(says, found[test]), found[test]


# ---- communicators -----------------------------------------------------------------------------------------


class LosesTheTail(RingCommunicator):
    """Does not reduce the elements that remain after a division into equal chunks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        whole = x.contiguous()
        each = whole.numel() // self.size
        chunks = [whole.view(-1)[i * each : (i + 1) * each] for i in range(self.size)]
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole


class OwnOrderOfSums(RingCommunicator):
    """Adds the ranks' tensors in another order on each rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        passing, total = x.contiguous().clone(), x.contiguous().clone()
        for _ in range(self.size - 1):
            arrived = torch.empty_like(passing)
            self.swap(passing, arrived)
            total += arrived
            passing = arrived
        return total


class OwnOrderOfParts(RingCommunicator):
    """Concatenates the ranks' tensors beginning with its own."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        parts = super().all_gather(x, dim).chunk(self.size, dim)
        return torch.cat([*parts[self.rank :], *parts[: self.rank]], dim)


class AddsResidualOnEveryRank(RingCommunicator):
    """Adds the residual before the all-reduce, once per rank."""

    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = self.all_reduce(x + residual)
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total


class Deadlocks(RingCommunicator):
    """Waits for the send before it receives."""

    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        self.send(outgoing, (self.rank + 1) % self.size).wait()
        self.receive(incoming, (self.rank - 1) % self.size).wait()


@pytest.mark.parametrize(
    ("wrong", "test", "says"),
    [
        (LosesTheTail, "test_all_reduce", r"\[1\] of float32 on 2 ranks: rank 0 got .*, not the sum"),
        (OwnOrderOfSums, "test_all_reduce_same_bits", "3 ranks: .* are not rank 0's"),
        (OwnOrderOfParts, "test_all_gather", "all_gather on 2 ranks"),
        (AddsResidualOnEveryRank, "test_all_reduce_norm", "all_reduce_norm: the norm"),
        (Deadlocks, "test_all_reduce", r"wait for each other: .*rank 0 at test_kits_of_parts\.py"),
    ],
)
def test_faulty_communicators(wrong: type[RingCommunicator], test: str, says: str) -> None:
    """The communicator kit finds each faulty communicator, with the expected message."""

    class Kit(CommunicatorConformance):
        limit = 2.0

        def make(self, rank: int, size: int, address: str) -> Communicator:
            return wrong(Ring(timeout=30), rank, size, address, torch.device("cpu"))

    with pytest.raises(AssertionError, match=says):
        getattr(Kit(), test)()


# ---- models ------------------------------------------------------------------------------------------------


def mix_up_norms(block: Block) -> None:
    """Use the weights of the key norm for the query norm."""
    block.self_attn.q_norm.weight = block.self_attn.k_norm.weight


def read_everything(block: Block) -> None:
    """Build the block as if there were one rank, so that each rank reads all weights."""
    ctx = block.self_attn.ctx
    alone = replace(ctx, comm=SimpleNamespace(rank=0, size=1))
    block.mlp, block.self_attn = MLP(CONFIG[0], alone), Attention(block.self_attn.spec.index, CONFIG[0], alone)
    block.self_attn.ctx = ctx


def skip_all_reduce(block: Block) -> None:
    """Return the MLP's partial sums without an all-reduce."""
    block.mlp.down_proj.reduce = False


def limit_window(block: Block) -> None:
    """Let each query see only its own key."""
    block.self_attn.spec = replace(block.self_attn.spec, window=1)


CONFIG: list[Any] = []


@pytest.mark.parametrize(
    ("change", "test", "says"),
    [
        (mix_up_norms, "test_whole_prompt", "a whole prompt: the logits of position 1 are off by"),
        (read_everything, "test_tensor_parallel", "rank 0 of 2 read .*; expected less than"),
        (skip_all_reduce, "test_tensor_parallel", "rank 0 of 2: the logits of position"),
        (limit_window, "test_chunks_and_batches", "page_size=1, a chunk: .* of position 1"),
    ],
)
def test_faulty_models(change: Callable[[Block], None], test: str, says: str) -> None:
    """The model kit finds each faulty model, with the expected message."""

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
