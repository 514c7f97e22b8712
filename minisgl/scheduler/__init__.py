"""The scheduler: which requests compute how many tokens in each step, and in which KV pages.

The interface that scheduling policies implement is in `minisgl.scheduler.base`.
"""

from __future__ import annotations

from typing import Any

from minisgl.plugin_manager.discovery import moved
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


def __getattr__(name: str) -> Any:
    return moved(__name__, name)
