"""Call counts of plugins: they show that a plugin that was loaded is also used.

The plugin manager counts the calls of plugins that the user named or installed. It does not count those of the built-in
plugins, so without such plugins no function is wrapped. The same wrapper keeps a plugin from ending the process.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from minisgl.plugin_manager.failures import named
from minisgl.plugins.external.failures import PluginError, ends_silently


class Calls(Counter[str]):
    """Name of a hook or method → number of calls. ``plugin`` is the plugin's file, for errors."""

    def __init__(self, *args: Any, plugin: str = ""):
        super().__init__(*args)
        self.plugin = plugin


def count_calls(function: Callable[..., Any], calls: Calls, name: str) -> Callable[..., Any]:
    """Return ``function`` wrapped so that each call increments ``calls[name]``.

    An exception that would end the process without a traceback, such as SystemExit, becomes a `PluginError`.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not ends_silently(error):
                raise
            raise PluginError(f"the plugin {calls.plugin} raised {named(error)} in {name}") from error

    return call


def counting_subclass(kind: type, calls: Calls) -> type:
    """Return a subclass of ``kind`` whose public methods increment ``calls`` under their own names.

    Raise TypeError if ``kind`` can't have subclasses.
    """
    methods: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__}
    for name in dir(kind):
        function = inspect.getattr_static(kind, name)
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__call__"):
            methods[name] = count_calls(function, calls, name)
    return type(kind)(kind.__name__, (kind,), methods)


def count_method_calls(made: object, calls: Calls) -> None:
    """Count the calls of the public methods of one object from now on.

    The object's class is replaced by a subclass. An object whose class can't be replaced stays as it is, uncounted.
    """
    try:
        made.__class__ = counting_subclass(type(made), calls)
    except TypeError:
        return
