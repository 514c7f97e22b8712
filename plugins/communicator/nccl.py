"""`communicator=nccl`: peers' memory read and written directly where that is faster, NCCL for the rest.

A decode step sums a few kilobytes twice a layer, where NCCL's protocol costs more than the bytes. There every GPU
pushes its rows into its peers' mailboxes and sums what comes, in one launch with the norm that follows (one-shot);
somewhat larger messages are summed in parts (two-shot, torch's symmetric memory). NVLink multicast is left off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.distributed.group import GroupCommunicator
from minisgl.hooks import hookimpl
from minisgl.kernel.launch import one_launch
from minisgl.kernel.reduce import Mailboxes, cut_mailboxes, empty, mailbox_bytes

MIB = 1 << 20


@dataclass
class Nccl:
    """Between GPUs of one host: sums in one launch for small messages, in two parts for larger ones, else NCCL."""

    one_shot_bytes: int | None = None
    """Sums up to this size take one launch, with the norm that follows in it; 0: never. By default what was measured
    on H200s: 10 MiB between two GPUs; among more each sends it to all others, and it is 4 MiB divided by those."""
    two_shot_bytes: int = 16 * MIB
    """Sums above that and up to this size go through torch's two-shot all-reduce; 0: never."""
    timeout: float = 300.0
    """Seconds after which a collective, or the wait for the other ranks at start, gives up."""


class NcclCommunicator(GroupCommunicator):
    """The group, and memory that all ranks share: first what two-shot sums in, then the mailboxes."""

    def __init__(self, config: Nccl, rank: int, size: int, address: str, device: torch.device):
        if size > 1 and device.type != "cuda":
            raise ConfigError("it links GPUs; on a CPU use communicator=torch.")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        super().__init__(config.timeout, rank, size, address, device)
        self.one_shot_bytes, self.two_shot_bytes = _limits(config, size)
        self._shared: Any = None
        self._mailboxes: Mailboxes | None = None  # for rows as the first message has them: a model has one width
        if size > 1 and self.one_shot_bytes + self.two_shot_bytes:
            self._share(f"minisgl-{address}")

    def _share(self, name: str) -> None:
        from minisgl.distributed.shared import SharedMemory

        size = self.two_shot_bytes + mailbox_bytes(self.one_shot_bytes, self.size)
        try:
            self._shared = SharedMemory(size, self.rank, self.size, self.device, self._store, name)
        except RuntimeError as error:
            raise ConfigError(
                f"the GPUs can't share memory, which communicator=nccl needs ({error}): use communicator=torch."
            ) from error
        empty(self._shared.parts[self.rank][self.two_shot_bytes :])
        torch.cuda.synchronize(self.device)
        self.exchange(b"")  # nobody may push into a mailbox that its owner is still emptying

    def _boxes_for(self, x: torch.Tensor) -> Mailboxes | None:
        """The mailboxes, where x can be summed through them."""
        if self._shared is None or x.nbytes > self.one_shot_bytes:
            return None
        if self._mailboxes is None:
            parts = [part[self.two_shot_bytes :] for part in self._shared.parts]
            self._mailboxes = cut_mailboxes(parts, self.rank, x)
        boxes = self._mailboxes
        return boxes if boxes is not None and boxes.fits(x) else None

    @one_launch
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if (boxes := self._boxes_for(x)) is not None:
            from minisgl.kernel.triton import reduce

            return reduce.all_reduce(x, boxes)
        if self._shared is None or not _suits_two_shot(x, self.two_shot_bytes):
            return super().all_reduce(x)
        # Who comes here again finds its peers done with this memory: the kernel ends when all ranks have read it.
        mine = self._shared.parts[self.rank][: x.nbytes].view(x.dtype).view(x.shape)
        mine.copy_(x)
        out: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(mine, "sum", self._shared.name, x)
        return out

    @one_launch
    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (boxes := self._boxes_for(x)) is None:
            return super().all_reduce_norm(x, residual, weight, eps)
        from minisgl.kernel.triton import reduce

        return reduce.all_reduce_norm(x, residual, weight, eps, boxes)

    def close(self, abort: bool = False) -> None:
        shared, self._shared, self._mailboxes = self._shared, None, None
        if shared is not None:
            shared.close()
        super().close(abort)


def _limits(config: Nccl, size: int) -> tuple[int, int]:
    """Bytes up to which a sum is one-shot, and two-shot; whole pieces of 16 bytes."""
    one_shot = config.one_shot_bytes
    if one_shot is None:
        one_shot = 10 * MIB if size == 2 else 4 * MIB // max(size - 1, 1)
    two_shot = config.two_shot_bytes if size in (2, 4, 8) else 0  # torch's kernel exists for these sizes
    return one_shot // 16 * 16, two_shot // 16 * 16


def _suits_two_shot(x: torch.Tensor, most: int) -> bool:
    """Whether torch's kernel takes x: two dtypes, in pieces of 16 bytes."""
    return (
        16 <= x.nbytes <= most
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_contiguous()
        and x.nbytes % 16 == 0
        and x.data_ptr() % 16 == 0
    )


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "communicator", "nccl", Nccl


@hookimpl
def minisgl_communicator(config: Any, rank: int, size: int, address: str, device: torch.device) -> Communicator | None:
    return NcclCommunicator(config, rank, size, address, device) if isinstance(config, Nccl) else None
