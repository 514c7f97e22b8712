"""Lab ring: An all-reduce without a centre.

Grade it:  python -m minisgl.lab test ring     (`hint ring` for a hint)
Serve it:  python -m minisgl plugins=my_ring.py communicator=mine
"""

# minisgl lab ring, skeleton 94337cc393 (minisgl 0.2.0)

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
class Mine:
    """All-reduce around a ring, from send and receive; on CPUs."""

    timeout: float = 300.0
    """Seconds after which a send or a receive, or the wait for the other ranks at start, gives up."""


class MyCommunicator(GroupCommunicator):
    """The group, with an all-reduce of its own. What stands here is the same on every rank but for ``self.rank``."""

    def __init__(self, config: Mine, rank: int, size: int, address: str, device: torch.device):
        if size > 1 and device.type != "cpu":
            raise ConfigError("This ring links CPUs; between GPUs use communicator=torch, or nccl.")
        super().__init__(config.timeout, rank, size, address, device)

    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send ``outgoing`` to the rank on the right, and fill ``incoming`` from the one on the left."""
        # TODO ring.swap
        # 1. Begin both before waiting for either: a send ends when the other side receives, and every rank sends.
        # 2. Wait for both: until then outgoing must not change, and incoming is not there.
        raise NotImplementedError

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> None:
        """Add up: afterwards ``chunks[r]`` of rank r is the sum of all ranks' ``chunks[r]``, the others are parts."""
        # TODO ring.reduce_scatter
        # 1. A chunk begins its way on the rank behind its own, and n - 1 steps bring it home.
        # 2. Pass on what the step before brought. It is another chunk on every rank.
        # 3. Add one's own part to what arrives, which needs a place of its own until then.
        raise NotImplementedError

    def circulate(self, chunks: Sequence[Tensor]) -> None:
        """Copy: where ``chunks[r]`` of rank r is right, afterwards all chunks of all ranks are."""
        # TODO ring.circulate
        # 1. The same way again, and nobody adds. Copies are alike to the last bit; sums in another order are not.
        raise NotImplementedError

    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same to the last bit on every one; x may be overwritten."""
        # TODO ring.all_reduce
        # 1. One rank has nobody to ask.
        # 2. A chunk for every rank. All elements count, also where the ranks do not divide them.
        # 3. Each rank completes one chunk, then hands it round: n - 1 times a chunk, twice.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "communicator", "mine", Mine


@hookimpl
def minisgl_communicator(config: Any, rank: int, size: int, address: str, device: torch.device) -> Communicator | None:
    return MyCommunicator(config, rank, size, address, device) if isinstance(config, Mine) else None
