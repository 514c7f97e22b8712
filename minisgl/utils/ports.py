"""Free TCP ports, for libraries that need a port number before they listen on it."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of the address ``host`` that is free now. Another process may use it before the caller does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
