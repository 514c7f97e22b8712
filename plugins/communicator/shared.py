"""Memory of each GPU that the GPUs of the other ranks can read and write, through torch's symmetric memory.

This module exchanges the memory handles between the ranks and knows which buffer belongs to which rank. The caller
decides what is written to the buffers, and when. NVLink multicast is not used. Each engine registers its memory with
torch under a name of its own, so several engines can live in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d


class SharedMemory:
    """One buffer per rank: ``parts[r]`` is a uint8 tensor of ``nbytes`` bytes on rank r's GPU.

    Every rank must construct this object with the same arguments, except for its own ``rank`` and ``device``. Raises
    RuntimeError if the GPUs can't share memory.
    """

    def __init__(
        self, nbytes: int, rank: int, size: int, device: torch.device, store: torch.distributed.Store, name: str
    ):
        self.name = name
        self._store = CountedStore(c10d.PrefixStore("shared", store))
        # torch 2.11 and later exchange handles through the store of a registered group; earlier versions take a store.
        self._group = torch.distributed.ProcessGroup(self._store, rank, size)
        c10d._register_process_group(name, self._group)  # type: ignore[arg-type]
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
            c10d._SymmetricMemory.set_group_info(name, rank, size, self._store)
        own = c10d._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, name)
        handle = c10d._SymmetricMemory.rendezvous(own, name)
        self.parts: list[Tensor] = [
            own if r == rank else handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(size)
        ]

    def close(self) -> None:
        """Release this rank's buffer. The caller must have dropped all views of it.

        A peer may still write to the buffer: the memory is freed only when all ranks have closed it.
        """
        self.parts = []
        c10d._unregister_process_group(self.name)  # type: ignore[arg-type]


class CountedStore(torch.distributed.Store):
    """A wrapper of ``store`` that renumbers keys of the form ``prefix/number/rank``.

    Each distinct number is replaced by its index in the order of first use (0, 1, 2, …). torch counts the exchanges of
    a process to number its keys. If one rank's process has run another engine before and another rank's process has
    not, their counts differ and they would wait for each other under different keys.
    """

    def __init__(self, store: torch.distributed.Store):
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        """Return ``key`` with its number replaced."""
        prefix, number, rank = key.rsplit("/", 2)
        return f"{prefix}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Store ``value`` under the renumbered key."""
        self._store.set(self._key(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for the renumbered key and return its value."""
        return self._store.get(self._key(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all renumbered keys are set."""
        names = [self._key(key) for key in keys]
        self._store.wait(names) if timeout is None else self._store.wait(names, timeout)
