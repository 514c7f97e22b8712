"""`between_pieces`: a mark for functions that run between the recorded pieces of a forward pass.

A recorder of CUDA graphs in pieces ends a piece at each call of a function marked `between_pieces`. `recording` sets
this recorder, and the one that `minisgl.utils.launch.one_launch` shows its calls to. This module knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec

from minisgl.utils.launch import Watcher, shown_to, watching_launches

P = ParamSpec("P")

_splitter: ContextVar[Watcher | None] = ContextVar("splitter", default=None)
_is_recorded: ContextVar[bool] = ContextVar("is_recorded", default=False)


def between_pieces(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate ``function`` so that a step recorded in pieces is cut at each call of it.

    One piece ends before the call and the next piece begins after it. A replay calls the function again with the same
    arguments. So the function must write its result into its arguments and return None.
    """
    return shown_to(_splitter, function)


def in_pieces() -> bool:
    """Return whether a step is being recorded in pieces in this thread: see `between_pieces`."""
    return _splitter.get() is not None


def in_recording() -> bool:
    """Return whether the launches of a step are being recorded in this thread, as a whole or in pieces."""
    return _is_recorded.get()


@contextmanager
def recording(recorder: Watcher | None, splitter: Watcher | None = None) -> Iterator[None]:
    """Pass marked calls to watchers while the context is entered, in this thread only.

    A call of a function marked `one_launch` goes to ``recorder``; a call of one marked `between_pieces` goes to
    ``splitter``. With None the function is called as usual.
    """
    token, recorded = _splitter.set(splitter), _is_recorded.set(recorder is not None or splitter is not None)
    try:
        with watching_launches(recorder):
            yield
    finally:
        _splitter.reset(token)
        _is_recorded.reset(recorded)
