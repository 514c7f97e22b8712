"""Errors in the code of plugins: which plugin raised an error, and exceptions that would end the process silently.

`SystemExit` ends a Python program without a traceback, with the status that the plugin chose, such as 0. So it is
replaced by a `PluginError` where code of a plugin is called. The built-in plugins are treated as parts of minisgl.
"""

from __future__ import annotations

import signal
import traceback
from types import ModuleType

from minisgl.plugin_manager.failures import named

MARK = "__minisgl_plugin__"
"""The global variable of a plugin's module with the plugin's file. `described` looks for it in tracebacks."""


class PluginError(RuntimeError):
    """Code of a plugin raised SystemExit, or another exception that is not an `Exception`."""


def mark(module: ModuleType, label: str) -> None:
    """Record that ``module`` is a plugin. ``label`` is its file, for errors."""
    module.__dict__[MARK] = label


def ends_silently(error: BaseException) -> bool:
    """Return whether an exception from a plugin must be replaced: only an `Exception` is an error for all its callers.

    A KeyboardInterrupt is Ctrl-C if Python's own handler of SIGINT is set. Otherwise only a plugin can have raised it.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return not isinstance(error, Exception | GeneratorExit)


def described(error: BaseException) -> str:
    """Return the type and text of an exception and, if code of a plugin raised it, the plugin, function and line."""
    text = str(error) if isinstance(error, PluginError) else named(error)
    frames = [frame for frame in traceback.walk_tb(error.__traceback__) if MARK in frame[0].f_globals]
    if not frames:
        return text
    (outer, _), (inner, line) = frames[0], frames[-1]
    plugin = inner.f_globals[MARK]
    return f"{text} (raised in {outer.f_code.co_qualname} of the plugin {plugin}, line {line})"


def is_silent(error: BaseException) -> bool:
    """Return whether code of a plugin raised an exception that would end the process silently."""
    return ends_silently(error) and any(MARK in frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
