"""How often a plugin's code is called: what shows that a file which was named is also used.

The host counts the plugins that somebody named or installed, never the built-in ones, so by default nothing is wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

Calls = Counter[str]
"""What was called → how often."""


def counting(function: Callable[..., Any], calls: Calls, name: str) -> Callable[..., Any]:
    """``function``, counted under ``name``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def counted_class(kind: type, calls: Calls) -> type:
    """A subclass of ``kind`` with every public method counted under its name. Raises TypeError for a class that can't
    have subclasses."""
    methods: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__}
    for name in dir(kind):
        function = inspect.getattr_static(kind, name)
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__call__"):
            methods[name] = counting(function, calls, name)
    return type(kind)(kind.__name__, (kind,), methods)


def count_methods(made: object, calls: Calls) -> None:
    """Count the public methods of one object from now on. One whose class can't be changed stays as it is."""
    try:
        made.__class__ = counted_class(type(made), calls)  # type: ignore[assignment]
    except TypeError:
        return
