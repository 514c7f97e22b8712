"""`communicator=nccl`: NCCL for large messages, peers' memory read directly for small ones.

A decode step reduces a few kilobytes twice a layer, where NCCL's protocol costs more than the bytes. The one-shot
all-reduce lets every GPU read its peers' buffers itself (torch's symmetric memory over NVLink). NVLink multicast is
left off. The links belong to this object and are registered under a name that no other engine has.
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


@dataclass
class Nccl:
    """NCCL between GPUs of one host, and a one-shot all-reduce for small messages."""

    one_shot_bytes: int = 512 * 1024
    """Messages up to this size are reduced one-shot; 0: never."""
    timeout: float = 300.0
    """Seconds after which a collective, or the wait for the other ranks at start, gives up."""


class NcclCommunicator(GroupCommunicator):
    """The group, and a buffer of each rank that its peers can read."""

    def __init__(self, config: Nccl, rank: int, size: int, address: str, device: torch.device):
        if size > 1 and device.type != "cuda":
            raise ConfigError("communicator=nccl links GPUs; on a CPU use communicator=torch.")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        super().__init__(config.timeout, rank, size, address, device)
        self._buffer: torch.Tensor | None = None
        if size > 1 and config.one_shot_bytes:
            self._share(config.one_shot_bytes, f"minisgl-{address}")

    def _share(self, nbytes: int, name: str) -> None:
        """A buffer that the peers can read."""
        from torch._C._distributed_c10d import _SymmetricMemory

        dist = torch.distributed
        self._name = name
        _SymmetricMemory.set_group_info(name, self.rank, self.size, dist.PrefixStore("symmetric", self._store))
        self._buffer = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self.device, name)
        _SymmetricMemory.rendezvous(self._buffer, name)

    @one_launch
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._buffer is None or x.nbytes > self._buffer.nbytes or x.nbytes % 16:
            return super().all_reduce(x)
        mine = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        mine.copy_(x)
        out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", self._name)
        return out

    def close(self, abort: bool = False) -> None:
        self._buffer = None
        super().close(abort)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "communicator", "nccl", Nccl


@hookimpl
def minisgl_communicator(config: Any, rank: int, size: int, address: str, device: torch.device) -> Communicator | None:
    return NcclCommunicator(config, rank, size, address, device) if isinstance(config, Nccl) else None
