"""`communicator=nccl`: NCCL for large messages, peers' memory read directly for small ones.

A decode step reduces a few kilobytes twice a layer, where NCCL's protocol costs more than the bytes. The one-shot
all-reduce lets every GPU read its peers' buffers itself (torch's symmetric memory over NVLink). NVLink multicast is
left off. The links belong to this object and are registered under a name that no other engine has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.hooks import hookimpl


@dataclass
class Nccl:
    """NCCL between GPUs of one host, and a one-shot all-reduce for small messages."""

    one_shot_bytes: int = 512 * 1024
    """Messages up to this size are reduced one-shot; 0: never."""
    timeout: float = 300.0
    """Seconds after which a collective, or the wait for the other ranks at start, gives up."""


class NcclCommunicator:
    """See `minisgl.distributed.Communicator`."""

    def __init__(self, config: Nccl, rank: int, size: int, address: str, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self._group: Any = None
        self._buffer: torch.Tensor | None = None
        self._exchanges = 0
        if size == 1:
            return
        if device.type != "cuda":
            raise ConfigError("communicator=nccl links GPUs; on a CPU use communicator=torch.")
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"tp={size} needs rank 0's address as host:port, got {address!r}.")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        dist = torch.distributed
        timeout = timedelta(seconds=config.timeout)
        self._store = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), rank, size, options)
        if config.one_shot_bytes:
            self._share(config.one_shot_bytes, f"minisgl-{address}")

    def _share(self, nbytes: int, name: str) -> None:
        """A buffer that the peers can read."""
        from torch._C._distributed_c10d import _SymmetricMemory

        dist = torch.distributed
        self._name = name
        _SymmetricMemory.set_group_info(name, self.rank, self.size, dist.PrefixStore("symmetric", self._store))
        self._buffer = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self.device, name)
        _SymmetricMemory.rendezvous(self._buffer, name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return x
        if self._buffer is not None and x.nbytes <= self._buffer.nbytes and x.nbytes % 16 == 0:
            mine = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
            mine.copy_(x)
            out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", self._name)
            return out
        self._group.allreduce([x]).wait()
        return x

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from minisgl.kernel.norm import add_rms_norm

        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self._group is None:
            return x
        dim %= x.dim()
        x = x.contiguous()
        parts = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._group._allgather_base(parts, x).wait()
        return parts.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self._group is not None:
            options = torch.distributed.BroadcastOptions()
            options.rootRank = src
            self._group.broadcast([x], options).wait()
        return x

    def exchange(self, data: bytes) -> list[bytes]:
        if self._group is None:
            return [data]
        turn, self._exchanges = self._exchanges, self._exchanges + 1
        self._store.set(f"exchange/{turn}/{self.rank}", data)  # type: ignore[arg-type]
        return [self._store.get(f"exchange/{turn}/{rank}") for rank in range(self.size)]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def close(self, abort: bool = False) -> None:
        group, self._group = self._group, None
        self._buffer = None
        if group is None:
            return
        if abort:
            group.abort()
        else:
            group.shutdown()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "communicator", "nccl", Nccl


@hookimpl
def minisgl_communicator(config: Any, rank: int, size: int, address: str, device: torch.device) -> Communicator | None:
    return NcclCommunicator(config, rank, size, address, device) if isinstance(config, Nccl) else None
