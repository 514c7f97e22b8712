"""The observer hooks as plain methods: an event without an observer costs one call of an empty function.

An event with observers calls their functions directly. pluggy is used only for hook wrappers and to print hook calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from minisgl import hooks


class Events:
    """One method per observer hook, for example ``events.request_added(req, now)``. Arguments are positional.

    ``observers`` is the plugin manager's ``hook`` (a pluggy ``HookRelay``), or None for no observers. ``subscribed``
    contains the names of the events that at least one observer implements; the scheduler checks it before it computes
    arguments that are expensive.
    """

    def __init__(self, observers: Any | None):
        self.subscribed: set[str] = set()
        for name in OBSERVERS:
            caller = getattr(observers, f"minisgl_{name}", None)
            if caller is not None and caller.get_hookimpls():
                self.subscribed.add(name)
            setattr(self, name, _positional(caller, name) if name in self.subscribed else _no_observer)

    def __getattr__(self, name: str) -> Any:
        # Only for type checkers: every event is set in __init__.
        raise AttributeError(name)


def _no_observer(*_: Any) -> None:
    """Do nothing: the event has no observer."""


def _positional(caller: Any, name: str) -> Any:
    """Return a function that takes the arguments of hook ``name`` by position and calls all implementations."""
    names = list(inspect.signature(getattr(hooks, f"minisgl_{name}")).parameters)
    impls = caller.get_hookimpls()
    if hooks.printed() or any(impl.wrapper or impl.hookwrapper for impl in impls):
        return lambda *args: caller(**dict(zip(names, args, strict=True)))
    # pluggy calls the implementation that was registered last first.
    calls = [(impl.function, [names.index(argument) for argument in impl.argnames]) for impl in reversed(impls)]
    return _select(*calls[0]) if len(calls) == 1 else _call_each([_select(*call) for call in calls])


def _select(function: Callable[..., Any], positions: Sequence[int]) -> Callable[..., None]:
    """Return a function that calls ``function`` with the arguments at ``positions`` only."""

    def call(*args: Any) -> None:
        function(*[args[i] for i in positions])

    return call


def _call_each(functions: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for function in functions:
            function(*args)

    return call


OBSERVERS = (
    "request_added",
    "prefix_matched",
    "request_retracted",
    "request_finished",
    "pages_allocated",
    "pages_cached",
    "pages_evicted",
    "pages_freed",
    "pages_counted",
    "batch_planned",
    "batch_scheduled",
    "step_finished",
)
