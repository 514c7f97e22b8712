"""Makes a student's observer: an object of the student's class with hooks, and the plugin manager that calls them.

A part can be graded before later parts are written: hooks of later parts may raise NotImplementedError, which is then
ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from minisgl.chapters.lab.grader.gate import Broken, Student
from minisgl.plugin_manager.manager import PluginManager

__all__ = ["call_hooks", "observer", "silence_others"]


def observer(student: Student, attribute: str, ready: Collection[str] | None = None) -> tuple[Any, PluginManager]:
    """Return a new object of the student's class with hooks, and the plugin manager that calls its hooks.

    ``attribute`` is the attribute in which the lab finds the observer's results. ``ready`` names the hooks that must be
    written by now (None: all). Raise `Broken` if no class has the attribute.
    """
    remote = getattr(student, "observer", None)
    if remote is not None:  # the student's code runs in another process
        there: tuple[Any, PluginManager] = remote(attribute, ready)
        return there
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


def silence_others(manager: PluginManager, ready: Collection[str]) -> None:
    """Let all hooks of the observer do nothing, except those in ``ready``: as if later parts were not written yet."""
    for plugin in manager._manager.get_plugins():
        for caller in manager._manager.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls():
                if caller.name not in ready:
                    implementation.function = lambda *_: None  # type: ignore[misc]


def _unless_unfinished(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotImplementedError:
            return None

    return call


def call_hooks(manager: PluginManager, calls: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Call many hooks, in order: (name, arguments). If the observer is in another process, they are sent together."""
    remote = getattr(manager, "call_hooks", None)
    if remote is not None:
        remote(calls)
        return
    for name, arguments in calls:
        getattr(manager.hook, name)(**arguments)
