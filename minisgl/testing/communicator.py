"""A kit to test communicators with: what each collective must give on every rank, and to the last bit.

Ranks are threads of one process. The oracle is what the ranks' tensors, which are known here, add up to in float64.
Knows `minisgl.distributed` and no communicator plugin: whoever writes one can test it with this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from minisgl.distributed import Communicator
from minisgl.kernel.norm import add_rms_norm
from minisgl.testing.ranks import LINKING_SECONDS, run_ranks

__all__ = ["CommunicatorConformance", "ReduceCase", "cases"]

T = TypeVar("T")


@dataclass(frozen=True)
class ReduceCase:
    """One all-reduce among ``ranks`` ranks. ``transposed``: the tensor is not contiguous."""

    ranks: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    transposed: bool = False

    def __str__(self) -> str:
        how = " transposed" if self.transposed else ""
        return f"{list(self.shape)}{how} of {str(self.dtype).removeprefix('torch.')} on {self.ranks} ranks"

    def parts(self, seed: int = 0) -> list[Tensor]:
        """Each rank's tensor. Small whole numbers where a dtype must hold their sum exactly."""
        generator = torch.Generator().manual_seed(seed)
        if self.dtype in (torch.float32, torch.float64):
            made = [torch.randn(self.shape, generator=generator).to(self.dtype) for _ in range(self.ranks)]
        else:
            made = [torch.randint(-8, 9, self.shape, generator=generator).to(self.dtype) for _ in range(self.ranks)]
        return [part.t().contiguous().t() if self.transposed else part for part in made]


def cases(ranks: int) -> list[ReduceCase]:
    """From the smallest: shapes that the ranks divide and shapes that they don't, fewer elements than ranks, none."""
    shapes = ((1,), (2,), (3,), (4,), (7,), (0,), (2, 3), (5, 8), (1, 1000))
    kinds = [ReduceCase(ranks, (5, 3), dtype) for dtype in (torch.bfloat16, torch.int64)]
    return [*(ReduceCase(ranks, shape) for shape in shapes), *kinds, ReduceCase(ranks, (3, 4), transposed=True)]


class CommunicatorConformance:
    """What every communicator must do. Subclass it in a test file, name it ``Test…`` and say how to make yours."""

    sizes: Sequence[int] = (2, 3)
    """How many ranks it is tried with."""
    limit = 10.0
    """Seconds after which ranks that are linked and wait for each other are called a deadlock."""

    def make(self, rank: int, size: int, address: str) -> Communicator:
        """One rank's communicator on CPUs; ``address`` is ``host:port`` of rank 0's rendezvous."""
        raise NotImplementedError

    def on_ranks(self, size: int, work: Callable[[Communicator], T]) -> list[T]:
        """``work`` on each of ``size`` ranks."""
        return run_ranks(size, work, make=self.make, limit=self.limit)

    def test_one_rank_alone_changes_nothing(self) -> None:
        comm = self.make(0, 1, "")
        x = torch.randn(3, 4)
        for got in (comm.all_reduce(x.clone()), comm.all_gather(x.clone()), comm.broadcast(x.clone())):
            assert torch.equal(got, x), "at size 1 a collective changed the tensor"
        assert comm.exchange(b"x") == [b"x"]
        with comm.capturing():
            pass
        comm.close()
        comm.close(abort=True)

    def test_a_rank_knows_its_place(self) -> None:
        for size in self.sizes:
            assert self.on_ranks(size, lambda c: (c.rank, c.size)) == [(rank, size) for rank in range(size)]

    def test_all_reduce_is_the_sum(self) -> None:
        for size in self.sizes:
            every = cases(size)

            def work(comm: Communicator, todo: Sequence[ReduceCase] = every) -> list[Tensor]:
                return [comm.all_reduce(case.parts()[comm.rank]).clone() for case in todo]

            got = self.on_ranks(size, work)
            for rank, results in enumerate(got):
                for case, result in zip(every, results, strict=True):
                    want = torch.stack([part.double() for part in case.parts()]).sum(0)
                    assert result.dtype == case.dtype, f"{case}: rank {rank} got {result.dtype}"
                    assert result.shape == want.shape, f"{case}: rank {rank} got the shape {list(result.shape)}"
                    assert torch.allclose(result.double(), want, atol=1e-5, rtol=1e-5), (
                        f"{case}: rank {rank} got {result.flatten()[:8].tolist()} …, not the sum"
                    )

    def test_all_reduce_gives_every_rank_the_same_bits(self) -> None:
        """Ranks that differ in the last bit sample other tokens, sooner or later."""
        for size in self.sizes:
            parts = ReduceCase(size, (64, 33)).parts()

            def work(comm: Communicator, parts: Sequence[Tensor] = parts) -> Tensor:
                return comm.all_reduce(parts[comm.rank].clone()).clone()

            got = self.on_ranks(size, work)
            for rank, x in enumerate(got):
                differ = int((x != got[0]).sum())
                assert differ == 0, f"{size} ranks: {differ} of {x.numel()} elements of rank {rank} are not rank 0's"

    def test_collectives_follow_each_other(self) -> None:
        """Many in a row, of other sizes each time: nothing of one is left for the next."""
        lengths = (1, 50, 2, 0, 17, 8, 3, 33)

        def work(comm: Communicator) -> list[float]:
            sums = []
            for i, length in enumerate(lengths * 3):
                x = torch.full((length,), float(10**comm.rank * (1 + i % 7)))
                sums.append(float(comm.all_reduce(x).sum()))
                assert torch.equal(
                    comm.broadcast(torch.tensor([comm.rank + i]), src=i % comm.size), torch.tensor([i % comm.size + i])
                )
            return sums

        for size in self.sizes:
            ones = sum(10**rank for rank in range(size))
            want = [float(length * ones * (1 + i % 7)) for i, length in enumerate(lengths * 3)]
            assert self.on_ranks(size, work) == [want] * size

    def test_all_reduce_norm_adds_the_residual_once(self) -> None:
        x, residual, weight = torch.randn(max(self.sizes), 5, 8), torch.randn(5, 8), torch.rand(8)

        def work(comm: Communicator) -> tuple[Tensor, Tensor]:
            return comm.all_reduce_norm(x[comm.rank].clone(), residual.clone(), weight, 1e-6)

        for size in self.sizes:
            want = add_rms_norm(x[:size].sum(0), residual.clone(), weight, 1e-6)
            for got in self.on_ranks(size, work):
                for a, b, what in zip(got, want, ("the norm", "the new residual"), strict=True):
                    torch.testing.assert_close(a, b, msg=partial("{}: {}".format, f"all_reduce_norm: {what}"))

    def test_all_gather_keeps_the_order_of_the_ranks(self) -> None:
        def work(comm: Communicator) -> list[Tensor]:
            x = torch.arange(6).view(2, 3) + 10 * comm.rank
            return [comm.all_gather(x), comm.all_gather(x, dim=0), comm.all_gather(x.t(), dim=0)]

        for size in self.sizes:
            every = [torch.arange(6).view(2, 3) + 10 * rank for rank in range(size)]
            want = [torch.cat(every, 1), torch.cat(every, 0), torch.cat([x.t() for x in every], 0)]
            for got in self.on_ranks(size, work):
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b), f"all_gather on {size} ranks: {a.tolist()}, not {b.tolist()}"

    def test_exchange_is_in_the_order_of_the_ranks(self) -> None:
        def work(comm: Communicator) -> list[list[bytes]]:
            return [comm.exchange(b"\0from %d" % comm.rank), comm.exchange(b"")]

        for size in self.sizes:
            assert self.on_ranks(size, work) == [[[b"\0from %d" % r for r in range(size)], [b""] * size]] * size

    def test_two_links_in_one_process_do_not_meet(self) -> None:
        """Two engines side by side. torch.distributed's default group, which they would share, stays unused."""
        size = self.sizes[0]

        def work(comm: Communicator) -> list[float]:
            def other(inner: Communicator) -> float:
                return float(inner.all_reduce(torch.ones(3)).sum())

            between = self.on_ranks(2, other) if comm.rank == 0 else []  # links two ranks while the others wait
            return [float(comm.all_reduce(torch.ones(2)).sum()), *between]

        self.limit += LINKING_SECONDS
        got = self.on_ranks(size, work)
        assert got == [[2.0 * size, 6.0, 6.0], *[[2.0 * size]] * (size - 1)]
        assert not torch.distributed.is_initialized(), "torch.distributed was given a default group"
