"""``communicator=ring``: a ring all-reduce between CPU ranks, built from send and receive, for readers.

Every rank communicates with its two neighbours only. With n ranks, each rank sends 2(n-1)/n of the message, less than
twice the message for any n; no rank is a bottleneck through which all bytes must pass. Patarasuk and Yuan, Bandwidth
Optimal All-reduce Algorithms for Clusters of Workstations, 2009. The other collectives are those of
`GroupCommunicator`. Between GPUs use NCCL, which has ring algorithms of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.distributed import Communicator


@dataclass
class Ring:
    """A ring all-reduce built from send and receive; on CPUs."""

    timeout: float = 300.0
    """Time limit in seconds of a send or a receive, and of the wait for the other ranks at start."""

    def build(self, rank: int, size: int, address: str, device: torch.device) -> Communicator:
        return RingCommunicator(self, rank, size, address, device)


class RingCommunicator(GroupCommunicator):
    """A process group with a ring all-reduce of its own.

    Every rank runs the same code; only ``self.rank`` differs. The base class has the methods all_gather,
    all_reduce_norm, broadcast, capturing, close, exchange, receive and send: give helper methods other names.
    """

    def __init__(self, config: Ring, rank: int, size: int, address: str, device: torch.device):
        if size > 1 and device.type != "cpu":
            raise ConfigError("this ring connects CPUs; between GPUs use communicator=torch or nccl.")
        super().__init__(config.timeout, rank, size, address, device)

    # lab: ring.swap
    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send ``outgoing`` to the right neighbour and, at the same time, receive ``incoming`` from the left."""
        # 1. Start both transfers before waiting for either. A send ends only when its receiver receives, and every rank
        #    sends: if all waited for their sends first, no rank would receive.
        sending = self.send(outgoing, (self.rank + 1) % self.size)
        receiving = self.receive(incoming, (self.rank - 1) % self.size)
        # 2. Wait for both: before that, outgoing must not be changed and incoming is not filled.
        receiving.wait()
        sending.wait()

    # lab: end

    # lab: ring.reduce_scatter
    def reduce_scatter(self, chunks: Sequence[Tensor]) -> None:
        """Sum the chunks in place: afterwards ``chunks[r]`` on rank r is the sum of all ranks' ``chunks[r]``.

        The other chunks of rank r then hold partial sums, which are not used any more. Chunks have one dimension and
        are contiguous. ``chunks`` may be a tuple: change its tensors, and not the sequence.
        """
        # 1. Chunk r starts on rank r + 1 and moves one rank to the right per step, so n - 1 steps bring it to rank r.
        for step in range(1, self.size):
            # 2. Send the chunk that the preceding step completed. In every step each rank sends a different chunk.
            outgoing = chunks[(self.rank - step) % self.size]
            incoming = chunks[(self.rank - step - 1) % self.size]
            # 3. Add the received partial sum to this rank's own part. Receive into a temporary tensor: receiving into
            #    the chunk itself would overwrite this rank's part.
            arrived = torch.empty_like(incoming)
            self.swap(outgoing, arrived)
            incoming += arrived

    # lab: end

    # lab: ring.circulate
    def circulate(self, chunks: Sequence[Tensor]) -> None:
        """Copy the finished chunks around the ring: afterwards every rank has all finished chunks.

        Before, only ``chunks[r]`` on rank r is finished.
        """
        # 1. The chunks move around the ring once more, now without addition. So all ranks get the same bits; if each
        #    rank summed for itself in its own order, the results would differ in rounding.
        for step in range(self.size - 1):
            outgoing = chunks[(self.rank - step) % self.size]
            incoming = chunks[(self.rank - step - 1) % self.size]
            self.swap(outgoing, incoming)

    # lab: end

    # lab: ring.all_reduce
    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, bit-identical on every rank; x may be overwritten.

        x may have any shape and strides, and any integer or floating-point dtype that PyTorch can add. The result has
        the shape and the dtype of x.
        """
        # 1. With one rank there is nothing to sum: x itself is the result, and nothing is sent.
        if self.size == 1:
            return x
        # 2. Split x into one chunk per rank. tensor_split keeps all elements if their number is not divisible by n.
        whole = x.contiguous()
        chunks = whole.view(-1).tensor_split(self.size)
        # 3. Each rank completes one chunk, then the chunks are copied to all ranks: 2(n - 1) sends of one chunk per
        #    rank.
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole

    # lab: end


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "communicator", "ring", Ring
