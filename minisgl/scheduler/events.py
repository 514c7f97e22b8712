"""The observer hooks as methods that cost nothing where nobody listens."""

from __future__ import annotations

from typing import Any

from minisgl import hooks


class Events:
    """``events.request_added(req, now)`` and so on for each observer hook, by position; ``wants`` names those heard."""

    def __init__(self, hook: Any | None):
        self.wants: set[str] = set()
        for name in OBSERVERS:
            caller = getattr(hook, f"minisgl_{name}", None)
            if caller is not None and caller.get_hookimpls():
                self.wants.add(name)
            setattr(self, name, _positional(caller, name) if name in self.wants else _nothing)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _nothing(*_: Any) -> None:
    """Nobody listens."""


def _positional(caller: Any, name: str) -> Any:
    spec = getattr(hooks, f"minisgl_{name}")
    names = spec.__code__.co_varnames[: spec.__code__.co_argcount]

    def call(*args: Any) -> None:
        caller(**dict(zip(names, args, strict=True)))

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
    "batch_scheduled",
    "step_finished",
)
