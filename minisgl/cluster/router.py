"""The interface of a router: the program part that clients talk to, and that passes their requests on to the replicas.

Routers are plugins (group `router`): the shipped ones are in `plugins/router/`. The supervisor calls the router; it
starts it before the replicas.
"""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

__all__ = ["Router", "address_of"]


class Router(Protocol):
    """Passes requests on to replicas. All calls come from one event loop."""

    status_url: str
    """The URL of ``/health``, ``/ready``, ``/replicas`` and ``/metrics`` of the cluster. Set by `start`."""

    def options(self, index: int) -> list[str]:
        """Return options that replica ``index`` needs for this router. Called before each start of the replica."""

    async def start(self) -> str:
        """Begin to listen, and return the URL. Raise `ConfigError` if the address can't be used."""

    async def add(self, index: int, url: str) -> None:
        """Send requests to replica ``index``, which is ready at ``url`` and whose cache is empty."""

    async def remove(self, index: int) -> None:
        """Send nothing to replica ``index`` any more, and forget its cache: it is dead. It may not have been added."""

    def set_healthy(self, index: int, healthy: bool) -> None:
        """Say whether replica ``index`` answers its health checks. An unhealthy one should get no new requests."""

    async def drain(self, seconds: float) -> None:
        """Accept no new requests, and wait until the open ones have ended, for at most ``seconds``."""

    async def wait_until_ended(self) -> str:
        """Wait until the router has ended by itself, which is a failure, and return the reason."""

    async def close(self) -> None:
        """End the router with everything that it started. Called once, also if `start` failed."""


def address_of(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port
