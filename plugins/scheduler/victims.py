"""Chooses the running requests that are retracted, so that waiting requests can be admitted.

The guard uses it for starved requests and for fair shares, and answers `Budget.retractions` of policies with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.core import Req
from minisgl.scheduler.planner import Planner

RETRACTION_SLACK = 4
"""Tokens for which a retraction frees pages beyond the reserve, for each running request that stays.

The pages of a retracted request may become free only a turn later. The other requests have then grown, and the
admission for which it was retracted must still fit beside the reserve.
"""


def retractions(planner: Planner, uids: Sequence[int]) -> list[int]:
    """Return the uids of the running requests to retract for the waiting ones: see `Budget.retractions`."""
    _, victims = select_victims(planner, [planner.requests.requests[uid] for uid in uids], RETRACTION_SLACK)
    return [req.uid for req in victims]


def select_victims(planner: Planner, order: Sequence[Req], slack: int = 0) -> tuple[list[Req], list[Req]]:
    """Return the waiting requests of ``order`` that can be admitted, and the running ones to retract for them.

    ``order`` has the most important request first. The running requests that are not in ``order`` count as retracted. A
    waiting request can be admitted if it fits beside those before it in ``order``; after one that does not fit, no
    further one is admitted. Each request that stays keeps the pages of the reserve, and pages for ``slack`` tokens
    more. The victims are the last running requests of ``order``, the last one first.
    """
    table, cache_manager = planner.request_table, planner.cache_manager
    spec = cache_manager.spec
    promised: Any = getattr(table, "num_promised_pages", 0)  # of `cache=groups`, for the rest of each prompt
    growth = table.page_growth(cache_manager.reserve.num_tokens + slack) + promised
    is_used = np.zeros(spec.num_pages + 1, bool)
    is_used[spec.num_pages] = True  # the scratch page, where a match has no page of its group
    admitted, victims = list[Req](), list[Req]()
    num_pages = num_rows = num_grown = 0  # num_grown: pages for later tokens of the request admitted last
    is_full = False
    for req in order:
        if req.req_pool_idx < 0:
            if is_full:
                continue
            match, cost = cache_manager.match(req), cache_manager.admission_cost(req)
            cached, num_new = match.pages, cost.pages - match.unlocked
            need = num_pages + num_grown + num_new + int(np.count_nonzero(~is_used[cached]))
            if need > spec.num_pages or num_rows == spec.max_running_requests:
                is_full = True
                continue
            num_grown = cost.growth
            is_used[cached] = True
            admitted.append(req)
        else:
            pages = table.pages_of(req)
            need = num_pages + int(np.count_nonzero(~is_used[pages])) + int(growth[req.req_pool_idx])
            is_too_many = need > spec.num_pages or num_rows == spec.max_running_requests
            if admitted and (victims or is_too_many):
                victims.append(req)
                is_full = True
                continue
            is_used[pages] = True
        num_pages, num_rows = need, num_rows + 1
    return admitted, victims[::-1]
