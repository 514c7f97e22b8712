"""Collectives through a process group of torch.distributed: gloo between CPUs, NCCL between GPUs.

It makes its process group object itself, from an address, and registers it nowhere: a process may hold several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from minisgl.config import ConfigError
from minisgl.kernel.launch import one_launch


class GroupCommunicator:
    """See `minisgl.distributed.Communicator`. ``timeout`` is in seconds. At size 1 nothing is sent."""

    def __init__(self, timeout: float, rank: int, size: int, address: str, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self.sent_bytes = 0
        """What `send` was given so far."""
        self._group: Any = None
        self._exchanges = 0
        if size > 1:
            self._connect(timedelta(seconds=timeout), address)

    def _connect(self, limit: timedelta, address: str) -> None:
        dist = torch.distributed
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"tp={self.size} needs rank 0's address as host:port, got {address!r}.")
        self._store = dist.TCPStore(host, int(port), self.size, is_master=self.rank == 0, timeout=limit)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            store = dist.PrefixStore("nccl", self._store)
            self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            store = dist.PrefixStore("gloo", self._store)
            try:
                self._group = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
                # Ranks are done at different times. One that closed its group now would look dead to one that isn't.
                self._group.barrier().wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"Rank {self.rank} of {self.size} could not connect to the others: one failed (its own error says "
                    f"why), or did not come in time ({limit.total_seconds():g} s). gloo says: {error}"
                ) from error

    @one_launch
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is not None:
            _wait(self._group.allreduce([x], _ordered(torch.distributed.AllreduceOptions())))
        return x

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from minisgl.kernel.norm import add_rms_norm

        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    @one_launch
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self._group is None:
            return x
        dim %= x.dim()
        x = x.contiguous()
        parts = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        _wait(self._group._allgather_base(parts, x, _ordered(torch.distributed.distributed_c10d.AllgatherOptions())))
        return parts.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self._group is not None:
            options = _ordered(torch.distributed.BroadcastOptions())
            options.rootRank = src
            _wait(self._group.broadcast([x], options))
        return x

    def send(self, x: torch.Tensor, to: int) -> torch.distributed.Work:
        """Begin to send contiguous x to rank ``to``, and return at once. It leaves only when that rank receives: until
        ``wait()`` on what is returned comes back, x must not change. ``wait`` raises RuntimeError after ``timeout``."""
        self.sent_bytes += x.nbytes
        return self._group.send([x], to, 0)

    def receive(self, x: torch.Tensor, source: int) -> torch.distributed.Work:
        """Begin to receive into contiguous x what rank ``source`` sends next; it is there after ``wait()``."""
        return self._group.recv([x], source, 0)

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
        if group is None:
            return
        if abort:
            group.abort()
        else:
            group.shutdown()


def _ordered(options: Any) -> Any:
    """The options of a collective that NCCL runs on the caller's stream: a stream of its own costs two waits."""
    options.asyncOp = False
    return options


def _wait(work: torch.distributed.Work | None) -> None:
    """On a CPU until it is done; on a GPU the stream's order says all. Some versions return nothing there."""
    if work is not None:
        work.wait()
