"""A TCP proxy for tests of connections: it can delay bytes, lose bytes, and cut the link without closing it.

The two directions are ``up``, from the side that connects, and ``down``, from the side that listens.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

__all__ = ["Direction", "Proxy"]

Direction = Literal["up", "down"]
BOTH: tuple[Direction, ...] = ("up", "down")


class Proxy:
    """A proxy in front of ``target`` (host:port), to use as a context manager. Clients connect to ``address``.

    ``delay`` is the time in seconds that every piece of data waits. ``lose`` has the number of pieces to lose next, by
    direction. Both may be changed at any time.
    """

    def __init__(self, target: str):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay = 0.0
        self.lose: dict[Direction, int] = dict.fromkeys(BOTH, 0)
        self._open = {direction: threading.Event() for direction in BOTH}
        for event in self._open.values():
            event.set()
        self._sockets: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, directions: Iterable[Direction] = BOTH) -> None:
        """Deliver nothing any more in these directions, not even the end of the connection."""
        for direction in directions:
            self._open[direction].clear()

    def mend(self) -> None:
        """Deliver everything again, beginning with what was held back."""
        for event in self._open.values():
            event.set()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.mend()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, target, direction in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(target=self._pump, args=(source, target, direction), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        with contextlib.suppress(OSError):
            data = b"-"
            while data and not self._closed:
                try:
                    data = source.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                time.sleep(self.delay)
                self._open[direction].wait()
                if self.lose[direction]:
                    self.lose[direction] -= 1
                elif data:
                    target.sendall(data)
                else:
                    target.shutdown(socket.SHUT_WR)
