"""Marks for what records a forward pass: what counts as one launch, and where a recording is cut in two.

A kernel that torch does not dispatch (a Triton kernel, a collective, a planned attention call) is invisible to a
recorder of torch operations; a function marked here is shown to it whole. Knows no recorder.
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
    """A decorator: a recorder keeps a call of ``function`` as one operation, and calls it again at each replay.

    What the function reads besides its arguments must be what was planned for the step, or static.
    """
    return _shown_to(_recorder, function)


def between_pieces(function: Callable[P, None]) -> Callable[P, None]:
    """A decorator: where a step is recorded in pieces, one ends before a call of ``function`` and the next begins
    after it. A replay calls the function again, with the same arguments: it writes into them, and returns nothing."""
    return _shown_to(_splitter, function)


def _shown_to(place: ContextVar[Watcher | None], function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        watcher = place.get()
        if watcher is None:
            return function(*args, **kwargs)
        return watcher(function, args, kwargs)  # type: ignore[no-any-return]

    return call


@contextmanager
def recording(recorder: Watcher | None, splitter: Watcher | None = None) -> Iterator[None]:
    """Show calls marked `one_launch` to ``recorder``, and those marked `between_pieces` to ``splitter`` (None: to
    nobody), while the context is entered, in this thread only."""
    tokens = _recorder.set(recorder), _splitter.set(splitter)
    try:
        yield
    finally:
        _recorder.reset(tokens[0])
        _splitter.reset(tokens[1])
