"""Free TCP ports, for libraries that need a port number before they listen on it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

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
