"""The observer hooks as methods that cost nothing where nobody listens, and little where somebody does: listeners are
called as plain functions, without pluggy in between."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from minisgl import hooks


class Events:
    """``events.request_added(req, now)`` and so on for each observer hook, by position; ``wants`` names those heard."""

    def __init__(self, hook: Any | None):
        self.subscribed: set[str] = set()
        for name in OBSERVERS:
            caller = getattr(hook, f"minisgl_{name}", None)
            if caller is not None and caller.get_hookimpls():
                self.subscribed.add(name)
            setattr(self, name, _positional(caller, name) if name in self.subscribed else _nothing)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _nothing(*_: Any) -> None:
    """Nobody listens."""


def _positional(caller: Any, name: str) -> Any:
    names = list(inspect.signature(getattr(hooks, f"minisgl_{name}")).parameters)
    impls = caller.get_hookimpls()
    if hooks.printed() or any(impl.wrapper or impl.hookwrapper for impl in impls):
        return lambda *args: caller(**dict(zip(names, args, strict=True)))
    calls = [(impl.function, [names.index(argument) for argument in impl.argnames]) for impl in reversed(impls)]
    return _one(*calls[0]) if len(calls) == 1 else _each([_one(*call) for call in calls])


def _one(function: Callable[..., Any], wanted: Sequence[int]) -> Callable[..., None]:
    """``function`` with those of the arguments that it asks for."""

    def call(*args: Any) -> None:
        function(*[args[i] for i in wanted])

    return call


def _each(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for one in calls:
            one(*args)

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
