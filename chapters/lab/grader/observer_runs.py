"""Runs of a student's observer on the simulated engine: a new observer for each workload, checked after each step.

For labs whose plugin is an observer; `minisgl.chapters.lab.grader.observers` makes the observer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minisgl.chapters.lab.grader.gate import Invalid
from minisgl.chapters.lab.grader.observers import call_hooks, observer, silence_others
from minisgl.chapters.lab.grader.simulated_workloads import jobs_of, shipped_cache, spec_of
from minisgl.core import Output
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.drive import Drive, make_plugin

__all__ = ["WatchedDrive", "call_hooks", "observer", "run", "silence_others", "watch"]


class WatchedDrive(Drive):
    """A drive that calls ``look(output)`` after each step of the scheduler, and ``look(None)`` after each abort."""

    look: Callable[[Output | None], None] = staticmethod(lambda output: None)

    def step(self) -> Output:
        output = super().step()
        self.look(output)
        return output

    def abort(self, uid: int) -> None:
        super().abort(uid)
        self.look(None)


def watch(workload: Mapping[str, Any], manager: PluginManager) -> WatchedDrive:
    """Return a drive for the workload, with the plugins of ``manager`` as observers.

    ``workload`` has the keys of `minisgl.chapters.lab.grader.simulated_workloads`, ``policy``, ``cache`` and
    ``overlap``.
    """
    spec = spec_of(workload)
    return WatchedDrive(
        spec,
        shipped_cache(workload["cache"], spec.page_size),
        make_plugin("scheduler", workload["policy"]),
        observers=manager.hook,
        thorough=False,
        overlap=bool(workload["overlap"]),
        max_prefill_tokens=workload["chunk"],
    )


def run(drive: WatchedDrive, workload: Mapping[str, Any]) -> None:
    """Serve the workload's requests to the end. Raise `Invalid` if the workload has no requests."""
    jobs = jobs_of(workload)
    if not jobs:
        raise Invalid
    drive.run(jobs, max_steps=5_000)
