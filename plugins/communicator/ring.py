"""`communicator=ring`: all-reduce around a ring of CPU ranks, from send and receive. To be read.

Every rank talks to its two neighbours only, and sends 2(n-1)/n of the message whatever n is: no rank is a centre that
all bytes must pass. Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
Everything but the all-reduce is the group's. Between GPUs, NCCL has rings of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.config import ConfigError
from minisgl.distributed.group import GroupCommunicator
from minisgl.hooks import hookimpl
from minisgl.kernel.launch import one_launch

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.distributed import Communicator


@dataclass
class Ring:
    """All-reduce around a ring, from send and receive; on CPUs."""

    timeout: float = 300.0
    """Seconds after which a send or a receive, or the wait for the other ranks at start, gives up."""


class RingCommunicator(GroupCommunicator):
    """The group, with an all-reduce of its own. What stands here is the same on every rank but for ``self.rank``."""

    def __init__(self, config: Ring, rank: int, size: int, address: str, device: torch.device):
        if size > 1 and device.type != "cpu":
            raise ConfigError("This ring links CPUs; between GPUs use communicator=torch, or nccl.")
        super().__init__(config.timeout, rank, size, address, device)

    # lab: ring.swap
    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send ``outgoing`` to the rank on the right, and fill ``incoming`` from the one on the left."""
        # 1. Begin both before waiting for either: a send ends when the other side receives, and every rank sends.
        sending = self.send(outgoing, (self.rank + 1) % self.size)
        receiving = self.receive(incoming, (self.rank - 1) % self.size)
        # 2. Wait for both: until then outgoing must not change, and incoming is not there.
        receiving.wait()
        sending.wait()

    # lab: end

    # lab: ring.reduce_scatter
    def reduce_scatter(self, chunks: Sequence[Tensor]) -> None:
        """Add up: afterwards ``chunks[r]`` of rank r is the sum of all ranks' ``chunks[r]``, the others are parts."""
        # 1. A chunk begins its way on the rank behind its own, and n - 1 steps bring it home.
        for step in range(1, self.size):
            # 2. Pass on what the step before brought. It is another chunk on every rank.
            outgoing = chunks[(self.rank - step) % self.size]
            incoming = chunks[(self.rank - step - 1) % self.size]
            # 3. Add one's own part to what arrives, which needs a place of its own until then.
            arrived = torch.empty_like(incoming)
            self.swap(outgoing, arrived)
            incoming += arrived

    # lab: end

    # lab: ring.circulate
    def circulate(self, chunks: Sequence[Tensor]) -> None:
        """Copy: where ``chunks[r]`` of rank r is right, afterwards all chunks of all ranks are."""
        # 1. The same way again, and nobody adds. Copies are alike to the last bit; sums in another order are not.
        for step in range(self.size - 1):
            outgoing = chunks[(self.rank - step) % self.size]
            incoming = chunks[(self.rank - step - 1) % self.size]
            self.swap(outgoing, incoming)

    # lab: end

    # lab: ring.all_reduce
    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same to the last bit on every one; x may be overwritten."""
        # 1. One rank has nobody to ask.
        if self.size == 1:
            return x
        # 2. A chunk for every rank. All elements count, also where the ranks do not divide them.
        whole = x.contiguous()
        chunks = whole.view(-1).tensor_split(self.size)
        # 3. Each rank completes one chunk, then hands it round: n - 1 times a chunk, twice.
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole

    # lab: end


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "communicator", "ring", Ring


@hookimpl
def minisgl_communicator(config: Any, rank: int, size: int, address: str, device: torch.device) -> Communicator | None:
    return RingCommunicator(config, rank, size, address, device) if isinstance(config, Ring) else None
