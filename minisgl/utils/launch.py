"""`one_launch`: a mark for functions whose work torch does not dispatch, such as a collective or planned attention.

A part of the group `graph` that records the operations of torch sees a call of such a function as one operation. The
core records nothing, and calls the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Watcher = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called as ``watcher(function, args, kwargs)`` in place of the function; returns what the function returned."""

_recorder: ContextVar[Watcher | None] = ContextVar("recorder", default=None)


def one_launch(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` so that a recorder keeps each call as one operation and calls it again at each replay.

    State that the function reads besides its arguments must be constant, or be set before each replay, as
    `AttentionBackend.plan` does.
    """
    return shown_to(_recorder, function)


def shown_to(variable: ContextVar[Watcher | None], function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that a call goes to the watcher in ``variable``, if there is one."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        watcher = variable.get()
        if watcher is None:
            return function(*args, **kwargs)
        return watcher(function, args, kwargs)  # type: ignore[no-any-return]

    return call


@contextmanager
def watching_launches(recorder: Watcher | None) -> Iterator[None]:
    """Pass calls of functions marked `one_launch` to ``recorder``, in this thread. None: call them as usual."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
