"""`communicator=nccl`: peers' memory read and written directly where that is faster, NCCL for the rest.

A decode step sums a few kilobytes twice a layer, where NCCL's protocol costs more than the bytes. There every GPU
pushes its rows into its peers' mailboxes and sums what comes, in one launch with the norm that follows (one-shot);
somewhat larger messages are summed in parts (two-shot, torch's symmetric memory). NVLink multicast is left off. The
memory is registered under a name that no other engine has.
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
from minisgl.kernel.reduce import BITS, Mailboxes, make_mailboxes


@dataclass
class Nccl:
    """Between GPUs of one host: sums in one launch for small messages, in two parts for larger ones, else NCCL."""

    one_shot_bytes: int = 2 * 1024 * 1024
    """Sums up to this size take one launch, with the norm that follows in it; 0: never."""
    two_shot_bytes: int = 32 * 1024 * 1024
    """Sums above that and up to this size go through torch's two-shot all-reduce; 0: never."""
    timeout: float = 300.0
    """Seconds after which a collective, or the wait for the other ranks at start, gives up."""


class NcclCommunicator(GroupCommunicator):
    """The group, and memory of each rank that its peers can read and write."""

    def __init__(self, config: Nccl, rank: int, size: int, address: str, device: torch.device):
        if size > 1 and device.type != "cuda":
            raise ConfigError("communicator=nccl links GPUs; on a CPU use communicator=torch.")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        super().__init__(config.timeout, rank, size, address, device)
        self._config = config
        self._name = f"minisgl-{address}"
        self._mailboxes: Mailboxes | None = None  # for rows as the first message has them: a model has one width
        self._two_shot: torch.Tensor | None = None
        if size == 1 or not (config.one_shot_bytes or config.two_shot_bytes):
            return
        self._meeting = _meet_as(self._name, rank, size, self._store)
        if size in (2, 4, 8) and config.two_shot_bytes:  # torch's kernel exists for these sizes
            self._two_shot = self._shared((config.two_shot_bytes,), torch.uint8)[rank]

    def _shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """A tensor of every rank, all of them readable and writable from here. Each rank must call it."""
        from torch._C._distributed_c10d import _SymmetricMemory

        strides = torch.empty(shape, device="meta").stride()
        try:
            mine = _SymmetricMemory.empty_strided_p2p(shape, strides, dtype, self.device, self._name)
            link = _SymmetricMemory.rendezvous(mine, self._name)
        except RuntimeError as error:
            raise ConfigError(
                f"the GPUs can't share memory, which communicator=nccl needs for small sums ({error}): use "
                "communicator=torch, or communicator.one_shot_bytes=0 communicator.two_shot_bytes=0."
            ) from error
        return [mine if r == self.rank else link.get_buffer(r, shape, dtype) for r in range(self.size)]

    def _boxes_for(self, x: torch.Tensor) -> Mailboxes | None:
        """The mailboxes, where x can be summed through them."""
        if self._group is None or x.nbytes > self._config.one_shot_bytes:
            return None
        if self._mailboxes is None and x.dim() == 2 and x.dtype in BITS:
            rows = self._config.one_shot_bytes // x[0].nbytes
            meet = lambda: self.exchange(b"")  # noqa: E731
            self._mailboxes = make_mailboxes(self._shared, meet, self.rank, self.size, rows, x)
        boxes = self._mailboxes
        return boxes if boxes is not None and boxes.fits(x) else None

    @one_launch
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if (boxes := self._boxes_for(x)) is not None:
            from minisgl.kernel.triton import reduce

            return reduce.all_reduce(x, boxes)
        if self._two_shot is None or not _suits_two_shot(x, self._two_shot.nbytes):
            return super().all_reduce(x)
        # Who comes here again finds its peers done with this buffer: the kernel ends when all ranks have read it.
        mine = self._two_shot[: x.nbytes].view(x.dtype).view(x.shape)
        mine.copy_(x)
        out: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(mine, "sum", self._name, x)
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
        if self._mailboxes is not None or self._two_shot is not None:
            self._mailboxes = self._two_shot = None
            _forget(self._name)
        super().close(abort)


def _meet_as(name: str, rank: int, size: int, store: torch.distributed.Store) -> Any:
    """Tell torch's symmetric memory where the ranks of ``name`` meet. Some versions of torch look for the store, some
    for a process group, of which they use the store, and which lives as long as somebody holds it: what is returned."""
    from torch._C import _distributed_c10d as c10d

    store = c10d.PrefixStore("symmetric", store)
    c10d._SymmetricMemory.set_group_info(name, rank, size, store)
    group = torch.distributed.ProcessGroup(store, rank, size)
    c10d._register_process_group(name, group)
    return group


def _forget(name: str) -> None:
    from torch._C import _distributed_c10d as c10d

    c10d._unregister_process_group(name)


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
