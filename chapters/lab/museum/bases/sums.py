"""A communicator with two ways to sum over the ranks: small tensors in one exchange, large ones around a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.hooks import hookimpl
from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.distributed import Communicator


@dataclass
class Sums:
    """Sums in one exchange, or around a ring; on CPUs."""

    timeout: float = 300.0
    """Time limit in seconds of a send or a receive, and of the wait for the other ranks at start."""
    small: int = 64
    """Largest number of elements that each rank sends to all others at once."""

    def build(self, rank: int, size: int, address: str, device: torch.device) -> Communicator:
        return SumCommunicator(self, rank, size, address, device)


class SumCommunicator(GroupCommunicator):
    """A process group whose all-reduce is built from sends and receives."""

    def __init__(self, config: Sums, rank: int, size: int, address: str, device: torch.device):
        super().__init__(config.timeout, rank, size, address, device)
        self.small = config.small

    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, with the same bits on each; x may be overwritten."""
        if self.size == 1:
            return x
        whole = x.contiguous()
        return self.at_once(whole) if whole.numel() <= self.small else self.around(whole)

    def at_once(self, x: Tensor) -> Tensor:
        """Sum a small tensor: each rank sends it to every other rank, and adds all in the order of the ranks."""
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        sending = [self.send(x, rank) for rank in others]
        receiving = [self.receive(parts[rank], rank) for rank in others]
        for transfer in receiving:
            transfer.wait()
        total = torch.stack(parts).sum(0, dtype=x.dtype)
        for transfer in sending:
            transfer.wait()
        return total

    def around(self, x: Tensor) -> Tensor:
        """Sum a large tensor in place: n chunks go around the ring, first to be summed and then to be copied."""
        chunks = x.view(-1).tensor_split(self.size)
        self.reduce_scatter(chunks)
        for step in range(self.size - 1):
            self.swap(chunks[(self.rank - step) % self.size], chunks[(self.rank - step - 1) % self.size])
        return x

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> None:
        """Sum the chunks in place: afterwards ``chunks[r]`` on rank r is complete."""
        for step in range(1, self.size):
            incoming = chunks[(self.rank - step - 1) % self.size]
            arrived = torch.empty_like(incoming)
            self.swap(chunks[(self.rank - step) % self.size], arrived)
            incoming += arrived

    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send ``outgoing`` to the right neighbour, and receive ``incoming`` from the left."""
        sending = self.send(outgoing, (self.rank + 1) % self.size)
        self.receive(incoming, (self.rank - 1) % self.size).wait()
        sending.wait()


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "communicator", "museum", Sums
