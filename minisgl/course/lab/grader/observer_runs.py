"""Runs of a student's observer on the simulated engine: a new observer for each workload, checked after each step.

For labs whose plugin is an observer. A part can be graded before later parts are written: hooks of later parts may
raise NotImplementedError, which is then ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from minisgl.core import Output
from minisgl.course.lab.grader.gate import Broken, Invalid, Student
from minisgl.course.lab.grader.simulated_workloads import jobs_of, shipped_cache, spec_of
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.drive import Drive, make_plugin

__all__ = ["WatchedDrive", "observer", "run", "watch"]


def observer(student: Student, attribute: str, ready: Collection[str] | None = None) -> tuple[Any, PluginManager]:
    """Return a new object of the student's class with hooks, and the plugin manager that calls its hooks.

    ``attribute`` is the attribute in which the lab finds the observer's results. ``ready`` names the hooks that must be
    written by now (None: all). Raise `Broken` if no class has the attribute.
    """
    manager = PluginManager()
    plugin = manager.add(str(student.path))
    made = [part for part in manager._manager.get_plugins() if type(part).__module__ == plugin.name]
    found = next((part for part in made if hasattr(part, attribute)), None)
    if found is None:
        seen = f"No class with hooks has this attribute. Classes with hooks: {[type(part).__name__ for part in made]}."
        raise Broken("loads", f"The observer keeps its results in the attribute `{attribute}`.", seen)
    if ready is not None:
        for caller in manager._manager.get_hookcallers(found) or ():
            for implementation in caller.get_hookimpls():
                if caller.name not in ready:
                    implementation.function = _unless_unfinished(implementation.function)  # type: ignore[misc]
    return found, manager


def _unless_unfinished(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotImplementedError:
            return None

    return call


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

    ``workload`` has the keys of `minisgl.course.lab.grader.simulated_workloads`, ``policy``, ``cache`` and
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
