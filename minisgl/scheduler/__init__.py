"""The scheduler: which requests compute how many tokens in each step, and in which KV pages.

The interface that scheduling policies implement is in `minisgl.scheduler.base`. "Promise 3" in comments and in names of
tests is the number of a promise in docs/architecture.md:

1. one final reply for each request; 2. a bad request is refused before it is queued; 3. each page and row has an owner;
4. no page table points to a freed page; 5. admission counts whole pages; 6. no starvation; 7. all ranks execute the
steps of rank 0; 8. an answer does not depend on other requests; 9. the pool is whole when idle; 10. a dead worker is
noticed.
"""

from __future__ import annotations

from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.page_allocator import PageAllocator, PageOwnershipError
from minisgl.scheduler.planner import PolicyError
from minisgl.scheduler.scheduler import Scheduler

__all__ = [
    "Budget",
    "PageAllocator",
    "PageOwnershipError",
    "Plan",
    "PolicyError",
    "Running",
    "Scheduler",
    "SchedulerPolicy",
    "Waiting",
]
