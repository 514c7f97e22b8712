"""Two decorators for functions that run inside a recorded forward pass: `one_launch` and `between_pieces`.

A recorder of torch operations (`graph=simulated`) does not see a kernel that torch does not dispatch: a Triton kernel,
a collective, a planned attention call. It sees a call of a function marked `one_launch` as one operation. A recorder of
CUDA graphs in pieces ends a piece at each call of a function marked `between_pieces`. This module knows neither
recorder.
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
_splitter: ContextVar[Watcher | None] = ContextVar("splitter", default=None)


def one_launch(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` so that a recorder keeps each call as one operation and calls it again at each replay.

    State that the function reads besides its arguments must be constant, or be set before each replay, as
    `AttentionBackend.plan` does.
    """
    return _shown_to(_recorder, function)


def between_pieces(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate ``function`` so that a step recorded in pieces is cut at each call of it.

    One piece ends before the call and the next piece begins after it. A replay calls the function again with the same
    arguments. So the function must write its result into its arguments and return None.
    """
    return _shown_to(_splitter, function)


def _shown_to(variable: ContextVar[Watcher | None], function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that a call goes to the watcher in ``variable``, if there is one."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        watcher = variable.get()
        if watcher is None:
            return function(*args, **kwargs)
        return watcher(function, args, kwargs)  # type: ignore[no-any-return]

    return call


def in_pieces() -> bool:
    """Return whether a step is being recorded in pieces in this thread: see `between_pieces`."""
    return _splitter.get() is not None


@contextmanager
def recording(recorder: Watcher | None, splitter: Watcher | None = None) -> Iterator[None]:
    """Pass marked calls to watchers while the context is entered, in this thread only.

    A call of a function marked `one_launch` goes to ``recorder``; a call of one marked `between_pieces` goes to
    ``splitter``. With None the function is called as usual.
    """
    tokens = _recorder.set(recorder), _splitter.set(splitter)
    try:
        yield
    finally:
        _recorder.reset(tokens[0])
        _splitter.reset(tokens[1])
