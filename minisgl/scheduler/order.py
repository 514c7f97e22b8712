"""In which order a policy looks at the waiting requests. Shared by the policies; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from minisgl.scheduler.base import Waiting

ORDERS = ("fcfs", "lpm")
LPM_WINDOW = 128
"""Longest prefix match looks at so many requests: matching all, each step, would cost more than it gains."""


def order_waiting(waiting: Sequence[Waiting], order: str) -> Iterator[Waiting]:
    """The waiting requests in ``order``: ``fcfs`` as they came, ``lpm`` the longest cached prefix first (SGLang's
    order, arXiv:2312.07104). One whose twin is about to compute the same prefix is left for a later step."""
    if order == "lpm":
        candidates = sorted(islice(waiting, LPM_WINDOW), key=lambda w: -w.num_cached_tokens)
        return (w for w in candidates if w.same_prefix_req is None)
    return (w for w in waiting if w.same_prefix_req is None)


def check_order(order: str) -> str:
    """``order`` if there is such an order; raises ValueError with the ones there are."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: there are {' and '.join(ORDERS)}")
    return order
