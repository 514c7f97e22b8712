"""A conformance kit for communicators: checks the result of each collective on every rank.

The ranks are threads of one process. The expected sums are computed in float64 from the tensors of all ranks. The kit
uses only the interface `minisgl.distributed`, so it applies to every communicator plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from minisgl.distributed import Communicator
from minisgl.plugins.kernels.ops.norm import add_rms_norm
from minisgl.testing.ranks import LINKING_SECONDS, run_ranks

__all__ = ["CommunicatorConformance", "ReduceCase", "cases"]

T = TypeVar("T")


@dataclass(frozen=True)
class ReduceCase:
    """One all-reduce of a tensor on ``ranks`` ranks. With ``transposed``, the tensor is not contiguous."""

    ranks: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    transposed: bool = False

    def __str__(self) -> str:
        how = " transposed" if self.transposed else ""
        return f"{list(self.shape)}{how} of {str(self.dtype).removeprefix('torch.')} on {self.ranks} ranks"

    def parts(self, seed: int = 0) -> list[Tensor]:
        """Return each rank's tensor: normally distributed for float32 and float64, else small integers."""
        generator = torch.Generator().manual_seed(seed)
        if self.dtype in (torch.float32, torch.float64):
            made = [torch.randn(self.shape, generator=generator).to(self.dtype) for _ in range(self.ranks)]
        else:
            made = [torch.randint(-8, 9, self.shape, generator=generator).to(self.dtype) for _ in range(self.ranks)]
        return [part.t().contiguous().t() if self.transposed else part for part in made]


def cases(ranks: int) -> list[ReduceCase]:
    """Return the cases to test on ``ranks`` ranks, in different dtypes.

    Among the numbers of elements are multiples of ``ranks``, other numbers, numbers smaller than ``ranks``, and 0.
    """
    shapes = ((1,), (2,), (3,), (4,), (7,), (0,), (2, 3), (5, 8), (1, 1000))
    kinds = [ReduceCase(ranks, (5, 3), dtype) for dtype in (torch.bfloat16, torch.int64)]
    return [*(ReduceCase(ranks, shape) for shape in shapes), *kinds, ReduceCase(ranks, (3, 4), transposed=True)]


class CommunicatorConformance:
    """The tests that every communicator must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, and implement `make`.
    """

    sizes: Sequence[int] = (2, 3)
    """The numbers of ranks to test."""
    limit = 10.0
    """Seconds within which linked ranks must complete a test; more on an overloaded machine. After this
    time the test fails with `Deadlock`."""

    def make(self, rank: int, size: int, address: str) -> Communicator:
        """Build the communicator of one rank on CPUs. ``address`` is ``host:port`` at which rank 0 listens."""
        raise NotImplementedError("make(self, rank, size, address) must return the communicator of one rank")

    def on_ranks(self, size: int, work: Callable[[Communicator], T]) -> list[T]:
        """Run ``work`` on each of ``size`` ranks and return the results in rank order."""
        return run_ranks(size, work, make=self.make, limit=self.limit)

    def test_one_rank(self) -> None:
        """With one rank, collectives return their input, and ``close`` may be called twice."""
        comm = self.make(0, 1, "")
        x = torch.randn(3, 4)
        for name, got in (
            ("all_reduce", comm.all_reduce(x.clone())),
            ("all_gather", comm.all_gather(x.clone())),
            ("broadcast", comm.broadcast(x.clone())),
        ):
            assert torch.equal(got, x), f"{name} with one rank changed the tensor; expected that it returns its input"
        _expect("exchange(b'x') with one rank", comm.exchange(b"x"), [b"x"])
        with comm.capturing():
            pass
        comm.close()
        comm.close(abort=True)

    def test_rank_and_size(self) -> None:
        """The attributes ``rank`` and ``size`` have the values that were passed to `make`."""
        for size in self.sizes:
            got = self.on_ranks(size, lambda c: (c.rank, c.size))
            _expect(f"(rank, size) on {size} ranks", got, [(rank, size) for rank in range(size)])

    def test_all_reduce(self) -> None:
        """all_reduce returns the sum of all ranks' tensors, in all cases of `cases`."""
        for size in self.sizes:
            every = cases(size)

            def work(comm: Communicator, todo: Sequence[ReduceCase] = every) -> list[Tensor]:
                return [comm.all_reduce(case.parts()[comm.rank]).clone() for case in todo]

            got = self.on_ranks(size, work)
            for rank, results in enumerate(got):
                for case, result in zip(every, results, strict=True):
                    want = torch.stack([part.double() for part in case.parts()]).sum(0)
                    seen = f"all_reduce of {case}: rank {rank} got"
                    assert result.dtype == case.dtype, f"{seen} the dtype {result.dtype}, expected {case.dtype}"
                    assert result.shape == want.shape, (
                        f"{seen} the shape {list(result.shape)}, expected {list(want.shape)}"
                    )
                    assert torch.allclose(result.double(), want, atol=1e-5, rtol=1e-5), (
                        f"{seen} {result.flatten()[:8].tolist()} …, not the sum {want.flatten()[:8].tolist()} …"
                    )

    def test_all_reduce_same_bits(self) -> None:
        """all_reduce returns equal bits on all ranks. Otherwise, ranks could sample different tokens."""
        for size in self.sizes:
            parts = ReduceCase(size, (64, 33)).parts()

            def work(comm: Communicator, parts: Sequence[Tensor] = parts) -> Tensor:
                return comm.all_reduce(parts[comm.rank].clone()).clone()

            got = self.on_ranks(size, work)
            for rank, x in enumerate(got):
                differ = int((x != got[0]).sum())
                assert differ == 0, (
                    f"all_reduce on {size} ranks: {differ} of {x.numel()} elements on rank {rank} are not rank 0's; "
                    "expected equal bits on all ranks"
                )

    def test_many_collectives(self) -> None:
        """Many collectives of different sizes in sequence: no collective affects the next."""
        lengths = (1, 50, 2, 0, 17, 8, 3, 33)

        def work(comm: Communicator) -> list[float]:
            sums = []
            for i, length in enumerate(lengths * 3):
                x = torch.full((length,), float(10**comm.rank * (1 + i % 7)))
                sums.append(float(comm.all_reduce(x).sum()))
                got = comm.broadcast(torch.tensor([comm.rank + i]), src=i % comm.size).tolist()
                _expect(f"broadcast {i} from rank {i % comm.size}", got, [i % comm.size + i])
            return sums

        for size in self.sizes:
            ones = sum(10**rank for rank in range(size))
            want = [float(length * ones * (1 + i % 7)) for i, length in enumerate(lengths * 3)]
            _expect(f"sums of {len(want)} all_reduce calls on {size} ranks", self.on_ranks(size, work), [want] * size)

    def test_all_reduce_norm(self) -> None:
        """all_reduce_norm adds the residual to the sum once, and returns the norm and the new residual."""
        x, residual, weight = torch.randn(max(self.sizes), 5, 8), torch.randn(5, 8), torch.rand(8)

        def work(comm: Communicator) -> tuple[Tensor, Tensor]:
            return comm.all_reduce_norm(x[comm.rank].clone(), residual.clone(), weight, 1e-6)

        for size in self.sizes:
            want = add_rms_norm(x[:size].sum(0), residual.clone(), weight, 1e-6)
            for got in self.on_ranks(size, work):
                for a, b, what in zip(got, want, ("the norm", "the new residual"), strict=True):
                    torch.testing.assert_close(a, b, msg=partial("{}: {}".format, f"all_reduce_norm: {what}"))

    def test_all_gather(self) -> None:
        """all_gather concatenates the ranks' tensors in rank order, along any dimension."""

        def work(comm: Communicator) -> list[Tensor]:
            x = torch.arange(6).view(2, 3) + 10 * comm.rank
            return [comm.all_gather(x), comm.all_gather(x, dim=0), comm.all_gather(x.t(), dim=0)]

        for size in self.sizes:
            every = [torch.arange(6).view(2, 3) + 10 * rank for rank in range(size)]
            want = [torch.cat(every, 1), torch.cat(every, 0), torch.cat([x.t() for x in every], 0)]
            for got in self.on_ranks(size, work):
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b), f"all_gather on {size} ranks returned {a.tolist()}, expected {b.tolist()}"

    def test_exchange(self) -> None:
        """`exchange` returns the bytes of all ranks in rank order, also empty bytes and bytes that contain 0."""

        def work(comm: Communicator) -> list[list[bytes]]:
            return [comm.exchange(b"\0from %d" % comm.rank), comm.exchange(b"")]

        for size in self.sizes:
            want = [[[b"\0from %d" % r for r in range(size)], [b""] * size]] * size
            _expect(f"exchange on {size} ranks", self.on_ranks(size, work), want)

    def test_two_communicators(self) -> None:
        """Two communicators in one process do not affect each other.

        They must not create torch.distributed's default group, which they would share.
        """
        size = self.sizes[0]

        def work(comm: Communicator) -> list[float]:
            def other(inner: Communicator) -> float:
                return float(inner.all_reduce(torch.ones(3)).sum())

            between = self.on_ranks(2, other) if comm.rank == 0 else []  # rank 0 links two more ranks meanwhile
            return [float(comm.all_reduce(torch.ones(2)).sum()), *between]

        self.limit += LINKING_SECONDS
        got = self.on_ranks(size, work)
        _expect("sums of two communicators", got, [[2.0 * size, 6.0, 6.0], *[[2.0 * size]] * (size - 1)])
        assert not torch.distributed.is_initialized(), (
            "the communicator created torch.distributed's default group; expected a group of its own"
        )


def _expect(what: str, got: object, want: object) -> None:
    assert got == want, f"{what}: got {got}, expected {want}"
