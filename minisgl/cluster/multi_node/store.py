"""The key-value store of torchrun, through which rank 0 tells the other ranks the address of its step channel.

The store has no authentication: the address that it gives may be wrong, and the handshake with rank 0 shows it.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch

_KEY = "minisgl/steps"


class AddressStore:
    """A connection to the store at ``host``:``port``. With ``serve``, this process runs the store itself.

    Every call waits at most ``seconds``. A name is looked up here, because torch's own lookup can take seconds.
    """

    def __init__(self, host: str, port: int, serve: bool, seconds: float):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._store = torch.distributed.TCPStore(
            str(found[4][0]),
            port,
            is_master=serve,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=serve,
        )

    def publish(self, address: str) -> None:
        """Tell the other ranks rank 0's address. Rank 0 must keep this object until they have connected."""
        self._store.set(_KEY, address)

    def wait_for_address(self) -> str:
        """Wait for rank 0's address, and return it."""
        return self._store.get(_KEY).decode()
