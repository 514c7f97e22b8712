"""The order in which a policy considers the waiting requests. All shipped policies but `static` use these functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from minisgl.scheduler.base import Waiting

ORDERS = ("fcfs", "lpm")
LPM_WINDOW = 128
"""``lpm`` sorts this many requests at the head of the queue.

A match of every waiting request in every step would cost more than the better order gains.
"""


def order_waiting(waiting: Sequence[Waiting], order: str) -> Iterator[Waiting]:
    """Return the waiting requests in ``order``, without requests that should wait for another request's prefix.

    ``fcfs`` is the order of arrival. ``lpm`` (longest prefix match, arXiv:2312.07104) sorts the first
    `LPM_WINDOW` requests by cached tokens, most first, and leaves out all later requests. In both orders, a request
    with a ``same_prefix_req`` is left out: in a later step, the cache holds the prefix that the other request is about
    to compute.
    """
    if order == "lpm":
        candidates = sorted(islice(waiting, LPM_WINDOW), key=lambda w: -w.num_cached_tokens)
        return (w for w in candidates if w.same_prefix_req is None)
    return (w for w in waiting if w.same_prefix_req is None)


def check_order(order: str) -> str:
    """Return ``order``. Raise ValueError, which lists the valid orders, if ``order`` is not a valid one."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: order must be {' or '.join(ORDERS)}")
    return order
