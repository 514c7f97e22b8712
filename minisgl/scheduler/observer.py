"""What the scheduler tells of its work, and to whom: `Observer`, and `HookObserver`, which calls the plugins' hooks.

An event without a hook costs one call of an empty method. An event with hooks calls their functions directly: pluggy is
used only for hook wrappers and to print hook calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from minisgl.core import I32, Req, Step, StepResult
from minisgl.plugin_manager.discovery import printed


class Observer:
    """Is told of the scheduler's events, and ignores them.

    The hook ``minisgl_<name>`` in `minisgl.hooks` says when the method ``<name>`` is called, and what its arguments
    are.
    """

    def request_added(self, req: Req, now: float) -> None: ...
    def prefix_matched(self, req: Req, pages: I32, step: int) -> None: ...
    def request_retracted(self, req: Req, step: int) -> None: ...
    def request_finished(self, req: Req, now: float) -> None: ...
    def pages_allocated(self, step: int, owners: I32, pages: I32) -> None: ...
    def pages_cached(self, step: int, req: Req, pages: I32, start: int, cached_pages: I32) -> None: ...
    def pages_evicted(self, step: int, pages: I32) -> None: ...
    def pages_freed(self, step: int, owner: int, pages: I32) -> None: ...
    def pages_counted(self, step: int, free: int, cached: int, evictable: int, retiring: int) -> None: ...
    def batch_planned(self, step: int, rows: Sequence[tuple[int, int]]) -> None: ...
    def batch_scheduled(self, step: Step, reqs: Sequence[Req], now: float) -> None: ...
    def step_finished(self, result: StepResult, reqs: Sequence[Req | None], now: float) -> None: ...


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class HookObserver(Observer):
    """Calls the hooks of plugins. ``relay`` is the plugin manager's ``hook``, a pluggy ``HookRelay``."""

    def __init__(self, relay: Any):
        for name in EVENTS:
            caller = getattr(relay, f"minisgl_{name}")
            if caller.get_hookimpls():
                setattr(self, name, _positional(caller, name))


def _positional(caller: Any, name: str) -> Callable[..., None]:
    """Return a function that takes the arguments of event ``name`` by position and calls all implementations."""
    names = list(inspect.signature(getattr(Observer, name)).parameters)[1:]
    impls = caller.get_hookimpls()
    if printed() or any(impl.wrapper or impl.hookwrapper for impl in impls):
        return lambda *args: caller(**dict(zip(names, args, strict=True)))
    # The function of a plugin may take only some of the arguments. The plugin that was registered last is called first.
    calls = [(impl.function, [names.index(argument) for argument in impl.argnames]) for impl in reversed(impls)]

    def call(*args: Any) -> None:
        for function, positions in calls:
            function(*[args[i] for i in positions])

    return call
