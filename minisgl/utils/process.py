"""What a process asks of its operating system: the kind of an address, and enough file descriptors."""

from __future__ import annotations

import ipaddress
import resource

__all__ = ["is_loopback", "raise_file_limit"]


def is_loopback(host: str) -> bool:
    """Return whether a server that listens at ``host`` can be reached from its own machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of file descriptors to ``wanted``, or to the hard limit if that is lower.

    Return the smaller of the two. A soft limit that is higher already stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
