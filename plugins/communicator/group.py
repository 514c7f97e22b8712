"""Collectives through a process group of torch.distributed: gloo between CPUs, NCCL between GPUs.

The communicator builds its own process group object from rank 0's address and does not register the group with
torch.distributed. So one process can hold several groups, for several engines.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.utils.launch import one_launch


class GroupCommunicator(Communicator):
    """A `Communicator` over one process group. At size 1 nothing is sent.

    ``timeout`` (seconds) limits each collective, and the wait for the other ranks at start. ``address`` is rank 0's
    ``host:port``.
    """

    def __init__(self, timeout: float, rank: int, size: int, address: str, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self.sent_bytes = 0
        """Total bytes passed to `send` so far."""
        self._group: Any = None
        self._exchanges = 0
        if size > 1:
            self._connect(timedelta(seconds=timeout), address)

    def _connect(self, limit: timedelta, address: str) -> None:
        """Build the process group. Raises ConfigError for a wrong address, RuntimeError if a rank does not connect."""
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
                # Ranks finish connecting at different times. If a rank closed its group before another rank has
                # connected, the other rank would take it for dead. The barrier makes all ranks wait.
                self._group.barrier().wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"Rank {self.rank} of {self.size} could not connect to the other ranks: one of them failed (its "
                    f"own error says why), or did not connect in time ({limit.total_seconds():g} s). gloo says: {error}"
                ) from error

    @one_launch
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over all ranks in place: see `Communicator.all_reduce`."""
        if self._group is not None:
            _wait(self._group.allreduce([x], _ordered(torch.distributed.AllreduceOptions())))
        return x

    @one_launch
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate x of all ranks along ``dim``: see `Communicator.all_gather`."""
        if self._group is None:
            return x
        dim %= x.dim()
        x = x.contiguous()
        parts = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        _wait(self._group._allgather_base(parts, x, _ordered(torch.distributed.distributed_c10d.AllgatherOptions())))
        return parts.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite x with rank ``src``'s x: see `Communicator.broadcast`."""
        if self._group is not None:
            options = _ordered(torch.distributed.BroadcastOptions())
            options.rootRank = src
            _wait(self._group.broadcast([x], options))
        return x

    def send(self, x: torch.Tensor, to: int) -> torch.distributed.Work:
        """Start sending contiguous x to rank ``to`` and return without waiting.

        The transfer happens only when rank ``to`` calls `receive`. x must not change until ``wait()`` on the returned
        work has returned; ``wait()`` raises RuntimeError after ``timeout``.
        """
        self.sent_bytes += x.nbytes
        work: torch.distributed.Work = self._group.send([x], to, 0)
        return work

    def receive(self, x: torch.Tensor, source: int) -> torch.distributed.Work:
        """Start receiving the next tensor from rank ``source`` into contiguous x, which is filled after ``wait()``."""
        work: torch.distributed.Work = self._group.recv([x], source, 0)
        return work

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes through the store of rank 0: see `Communicator.exchange`."""
        if self._group is None:
            return [data]
        turn, self._exchanges = self._exchanges, self._exchanges + 1
        self._store.set(f"exchange/{turn}/{self.rank}", data)  # type: ignore[arg-type]
        return [self._store.get(f"exchange/{turn}/{rank}") for rank in range(self.size)]

    def close(self, abort: bool = False) -> None:
        """Shut the process group down, or abort it without waiting for the other ranks."""
        group, self._group = self._group, None
        if group is None:
            return
        if abort:
            group.abort()
        else:
            group.shutdown()


def _ordered(options: Any) -> Any:
    """Set ``options`` so that NCCL runs on the caller's stream: with its own stream it needs two more stream waits."""
    options.asyncOp = False
    return options


def _wait(work: torch.distributed.Work | None) -> None:
    """Wait for a collective: on a CPU until it has finished, on a GPU only in the order of the stream.

    ``work`` is None on a GPU with some torch versions, which return no work object for a collective on the caller's
    stream.
    """
    if work is not None:
        work.wait()
