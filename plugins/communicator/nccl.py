"""``communicator=nccl``: all-reduce through the peers' GPU memory up to a message size; NCCL for all else.

A decode step all-reduces a few kilobytes twice per layer. For such messages NCCL's protocol takes longer than the
transfer of the bytes. There are three algorithms, by message size. One-shot (small): every GPU writes its rows into its
peers' mailboxes and sums the rows that arrive, in one launch together with the following norm. Two-shot (medium):
torch's kernel for symmetric memory, in which each rank sums one part and then gathers the others. NCCL (large). NVLink
multicast is not used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.hooks import hookimpl
from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.plugins.kernels.ops.norm import add_rms_norm
from minisgl.plugins.kernels.ops.reduce import Mailboxes, cut_mailboxes, empty, mailbox_bytes
from minisgl.utils.launch import one_launch

MIB = 1 << 20


@dataclass
class Nccl:
    """Between GPUs of one host: one-shot all-reduce for small messages, two-shot for larger ones, else NCCL."""

    one_shot_bytes: int | None = None
    """Messages of at most this size are all-reduced one-shot, in one launch with the following norm; 0: never.
    The default was measured on H200s: 10 MiB for two GPUs, 4 MiB divided by the number of peers for more GPUs,
    because each GPU sends the message to every peer."""
    two_shot_bytes: int = 16 * MIB
    """Larger messages of at most this size go through torch's two-shot all-reduce; 0: never."""
    timeout: float = 300.0
    """Time limit in seconds of a collective, and of the wait for the other ranks at start."""

    def build(self, rank: int, size: int, local_size: int, address: str, device: torch.device) -> Communicator:
        if local_size < size:
            raise ConfigError(
                "communicator=nccl connects GPUs of one host: between several hosts use communicator=torch."
            )
        return NcclCommunicator(self, rank, size, address, device)


class NcclCommunicator(GroupCommunicator):
    """A NCCL process group plus shared GPU memory for the one-shot and two-shot all-reduce.

    Each rank's part of the shared memory holds the buffer of the two-shot all-reduce first, then the mailboxes of the
    one-shot all-reduce.
    """

    def __init__(self, config: Nccl, rank: int, size: int, address: str, device: torch.device):
        if size > 1 and device.type != "cuda":
            raise ConfigError("this communicator connects GPUs; on a CPU use communicator=torch.")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        super().__init__(config.timeout, rank, size, address, device)
        self.one_shot_bytes, self.two_shot_bytes = _limits(config, size)
        self._shared: Any = None
        self._mailboxes: Mailboxes | None = None  # laid out at the first message: all rows of a model have one size
        if size > 1 and self.one_shot_bytes + self.two_shot_bytes:
            self._share(f"minisgl-{address}")

    def _share(self, name: str) -> None:
        """Allocate the shared memory. Raises `ConfigError` if the GPUs can't access each other's memory."""
        from minisgl.plugins.communicator.shared import SharedMemory

        size = self.two_shot_bytes + mailbox_bytes(self.one_shot_bytes, self.size)
        try:
            self._shared = SharedMemory(size, self.rank, self.size, self.device, self._store, name)
        except RuntimeError as error:
            raise ConfigError(
                f"the GPUs can't share memory, which communicator=nccl needs ({error}): use communicator=torch."
            ) from error
        empty(self._shared.parts[self.rank][self.two_shot_bytes :])
        torch.cuda.synchronize(self.device)
        self.exchange(b"")  # a barrier: no rank may write into a mailbox before its owner has initialised it

    def _boxes_for(self, x: torch.Tensor) -> Mailboxes | None:
        """Return the mailboxes, or None if x can't be all-reduced one-shot."""
        if self._shared is None or x.nbytes > self.one_shot_bytes:
            return None
        if self._mailboxes is None:
            parts = [part[self.two_shot_bytes :] for part in self._shared.parts]
            self._mailboxes = cut_mailboxes(parts, self.rank, x)
        boxes = self._mailboxes
        return boxes if boxes is not None and boxes.fits(x) else None

    @one_launch
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce one-shot, two-shot or through NCCL, by the size of x: see `Communicator.all_reduce`."""
        if (boxes := self._boxes_for(x)) is not None:
            from minisgl.plugins.kernels.ops.triton import reduce

            return reduce.all_reduce(x, boxes)
        if self._shared is None or not _suits_two_shot(x, self.two_shot_bytes):
            return super().all_reduce(x)
        # The next call may overwrite this buffer at once: the two-shot kernel ends only when all ranks have read it.
        buffer = self._shared.parts[self.rank][: x.nbytes].view(x.dtype).view(x.shape)
        buffer.copy_(x)
        out: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._shared.name, x)
        return out

    @one_launch
    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, add and normalise, in one launch if x is small: see `Communicator.all_reduce_norm`."""
        if (boxes := self._boxes_for(x)) is None:
            return add_rms_norm(self.all_reduce(x), residual, weight, eps)
        from minisgl.plugins.kernels.ops.triton import reduce

        return reduce.all_reduce_norm(x, residual, weight, eps, boxes)

    def close(self, abort: bool = False) -> None:
        """Release the shared memory and close the process group: see `Communicator.close`."""
        shared, self._shared, self._mailboxes = self._shared, None, None
        if shared is not None:
            shared.close()
        super().close(abort)


def _limits(config: Nccl, size: int) -> tuple[int, int]:
    """Return the largest message, in bytes, for one-shot and for two-shot, each a multiple of 16."""
    one_shot = config.one_shot_bytes
    if one_shot is None:
        one_shot = 10 * MIB if size == 2 else 4 * MIB // max(size - 1, 1)
    two_shot = config.two_shot_bytes if size in (2, 4, 8) else 0  # torch's kernel supports these numbers of ranks only
    return one_shot // 16 * 16, two_shot // 16 * 16


def _suits_two_shot(x: torch.Tensor, max_bytes: int) -> bool:
    """Return whether torch's two-shot kernel supports x: one of two dtypes, aligned to 16 bytes, not too large."""
    return (
        16 <= x.nbytes <= max_bytes
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_contiguous()
        and x.nbytes % 16 == 0
        and x.data_ptr() % 16 == 0
    )


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "communicator", "nccl", Nccl
