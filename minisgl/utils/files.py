"""The number of files that this process may open."""

from __future__ import annotations

import resource


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
