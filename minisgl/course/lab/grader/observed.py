"""A student's observer on the simulated engine: a new object for each try, and a drive that looks at it as it goes.

For labs whose plugin listens. A part can be graded before the later ones are written: the hooks of those may raise
NotImplementedError, and are then as if they were not there.
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
    """A new object of the student's class with hooks, and the host that calls it. ``attribute`` is what the lab reads
    of it. ``ready``: the hooks that must be written by now (None: all)."""
    manager = PluginManager()
    plugin = manager.add(str(student.path))
    made = [part for part in manager._manager.get_plugins() if type(part).__module__ == plugin.name]
    found = next((part for part in made if hasattr(part, attribute)), None)
    if found is None:
        seen = f"No object with hooks has {attribute!r}: there are {[type(part).__name__ for part in made]}."
        raise Broken("loads", f"The observer keeps what it found in `{attribute}`.", seen)
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
    """Calls ``look(output)`` after each turn of the scheduler, and with None after each hang-up."""

    look: Callable[[Output | None], None] = staticmethod(lambda output: None)

    def step(self) -> Output:
        output = super().step()
        self.look(output)
        return output

    def abort(self, uid: int) -> None:
        super().abort(uid)
        self.look(None)


def watch(workload: Mapping[str, Any], manager: PluginManager) -> WatchedDrive:
    """Return a drive for the workload, with the plugins of `host` as observers.

    ``workload`` has the keys of `minisgl.course.lab.grader.simulated_workloads`, ``policy``, ``cache`` and
    ``overlap``.
    """
    spec = spec_of(workload)
    return WatchedDrive(
        spec,
        shipped_cache(workload["cache"], spec.page_size),
        make_plugin("scheduler", workload["policy"]),
        hook=manager.hook,
        thorough=False,
        overlap=bool(workload["overlap"]),
        max_prefill_tokens=workload["chunk"],
    )


def run(drive: WatchedDrive, workload: Mapping[str, Any]) -> None:
    """Serve the workload's clients to the end. Raises `Invalid` where there are none."""
    jobs = jobs_of(workload)
    if not jobs:
        raise Invalid
    drive.run(jobs, max_steps=5_000)
