"""The built-in scheduling policies (group `scheduler`), one file each, and the order of waiting requests.

All of them but `static` and `priority` use `order_waiting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from minisgl.scheduler.base import Waiting

ORDERS = ("fcfs", "lpm")
LPM_WINDOW = 128
"""``lpm`` sorts this many requests at the head of the queue.

A match of every waiting request in every step would cost more than the better order gains.
"""

MAX_SKIPPED = 256
"""``fcfs`` stops after it left out this many requests that should wait for another request's prefix.

This limits the cost of a step in which thousands of copies of a prompt wait. The requests behind the copies wait until
the first copy has computed its prompt.
"""


def order_waiting(waiting: Sequence[Waiting], order: str) -> Iterator[Waiting]:
    """Return the waiting requests in ``order``, without requests that should wait for another request's prefix.

    ``fcfs`` is the order of arrival. ``lpm`` (longest prefix match, arXiv:2312.07104) sorts the first
    `LPM_WINDOW` requests by cached tokens, most first, and leaves out all later requests. In both orders, a request
    with a ``same_prefix_req`` is left out: in a later step, the cache holds the prefix that the other request is about
    to compute. ``fcfs`` leaves out at most `MAX_SKIPPED` requests for this reason, and then all later ones too.
    """
    if order == "lpm":
        candidates = sorted(islice(waiting, LPM_WINDOW), key=lambda w: -w.num_cached_tokens)
        return (w for w in candidates if w.same_prefix_req is None)
    return _first_come_first_served(waiting)


def _first_come_first_served(waiting: Sequence[Waiting]) -> Iterator[Waiting]:
    skipped = 0
    for w in waiting:
        if w.same_prefix_req is None:
            yield w
        elif (skipped := skipped + 1) == MAX_SKIPPED:
            return


def check_order(order: str) -> str:
    """Return ``order``. Raise ValueError, which lists the valid orders, if ``order`` is not a valid one."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: order must be {' or '.join(ORDERS)}")
    return order
