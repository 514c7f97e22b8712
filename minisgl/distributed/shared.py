"""Memory of each GPU that the GPUs of the other ranks can read and write, through torch's symmetric memory.

Knows how ranks meet and whose memory is where; what is written there, and when, is its user's business. NVLink
multicast is not used. Everything stands under a name that no other engine of the process has.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d


class SharedMemory:
    """``parts[r]``: ``nbytes`` bytes on rank r's GPU, uint8. Every rank must make it, with the same arguments but its
    own ``rank`` and ``device``. Raises RuntimeError where the GPUs can't share memory."""

    def __init__(
        self, nbytes: int, rank: int, size: int, device: torch.device, store: torch.distributed.Store, name: str
    ):
        self.name = name
        self._store = CountedStore(c10d.PrefixStore("shared", store))
        # torch 2.11 and later meet through the store of a registered group, earlier ones through a store by itself.
        self._group = torch.distributed.ProcessGroup(self._store, rank, size)
        c10d._register_process_group(name, self._group)  # type: ignore[arg-type]
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
            c10d._SymmetricMemory.set_group_info(name, rank, size, self._store)
        mine = c10d._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, name)
        link = c10d._SymmetricMemory.rendezvous(mine, name)
        self.parts: list[Tensor] = [
            mine if r == rank else link.get_buffer(r, (nbytes,), torch.uint8) for r in range(size)
        ]

    def close(self) -> None:
        """Give this rank's memory back, once nobody has views of it. A peer that still writes there does no harm: the
        memory lives until all have closed."""
        self.parts = []
        c10d._unregister_process_group(self.name)  # type: ignore[arg-type]


class CountedStore(torch.distributed.Store):
    """``store``, whose keys ``prefix/number/rank`` are numbered anew, by the order in which numbers are first used.

    torch numbers its exchanges by how many the process has made so far. Ranks whose processes have had other engines
    before, or not, would wait for each other under different keys.
    """

    def __init__(self, store: torch.distributed.Store):
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        return f"{prefix}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._key(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        names = [self._key(key) for key in keys]
        self._store.wait(names) if timeout is None else self._store.wait(names, timeout)
