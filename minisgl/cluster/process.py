"""Several processes on one machine: free ports for them, and their end together with their parent."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["free_port", "when_input_closes", "when_parent_ends"]

FIRST = 20_000
"""The lowest port that `free_port` returns. Well-known servers have lower ports."""
TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of the address ``host`` that is free now. Another process may use it before the caller does.

    On Linux, the system itself chooses higher ports, for outgoing connections and for sockets that bind port 0. So only
    another caller of this function could take the port. The caller's random seed has no influence.
    """
    draw, end = random.SystemRandom(), _first_ephemeral()
    for _ in range(TRIES):
        port = draw.randrange(FIRST, end) if end > FIRST else 0
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no free port of {host} was found in {TRIES} tries")


def _first_ephemeral() -> int:
    """Return the lowest port that the system itself chooses, or 0 if the system does not say."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def when_input_closes(end: Callable[[], object]) -> None:
    """Call ``end`` in another thread when the standard input of this process is closed. Returns at once.

    The parent holds a pipe to the standard input of its child. The operating system closes it however the parent ends.
    """

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin.read: the program must not exit while a thread holds sys.stdin's lock
            pass
        end()

    threading.Thread(target=wait, daemon=True).start()


def when_parent_ends(end: Callable[[], object], poll_seconds: float, parent: int = 0) -> None:
    """Call ``end`` in another thread when the process with the id ``parent`` has ended. Returns at once.

    ``parent`` is the process that started this one; 0 is the present parent. The thread checks every ``poll_seconds``
    seconds whether this process still has that parent.
    """
    parent = parent or os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(poll_seconds)
        end()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
