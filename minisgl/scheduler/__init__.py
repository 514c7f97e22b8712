"""The scheduler: who computes what, when, and in which pages. The seams are in `minisgl.scheduler.base`."""

from __future__ import annotations

from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting

__all__ = ["Budget", "Plan", "Running", "SchedulerPolicy", "Waiting"]
