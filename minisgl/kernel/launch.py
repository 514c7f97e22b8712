"""Marks what counts as one launch, for graph runners that record operations rather than a device's stream.

A kernel that torch does not dispatch (a Triton kernel, a collective, a planned attention call) is invisible to a
recorder of torch operations; a function marked here is shown to it whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Recorder = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called as ``recorder(function, args, kwargs)`` in place of the function; returns what the function returned."""

_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def one_launch(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: a recorder keeps a call of ``function`` as one operation, and calls it again at each replay.

    What the function reads besides its arguments must be what was planned for the step, or static.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = _recorder.get()
        if recorder is None:
            return function(*args, **kwargs)
        return recorder(function, args, kwargs)  # type: ignore[no-any-return]

    return call


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Show marked calls to ``recorder`` (None: to nobody) while the context is entered, in this thread only."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
