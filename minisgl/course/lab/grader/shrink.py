"""Making a failing workload small: leave out what is not needed, then lower numbers (delta debugging, Zeller 2002).

A workload is JSON; what its parts mean is the gate's business, which refuses those that mean nothing. Deterministic.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Found = TypeVar("Found")
Path = tuple[Any, ...]


def smallest(workload: Any, found: Found, still: Callable[[Any], Found | None], until: float) -> tuple[Any, Found]:
    """The smallest workload found by ``until`` (a time of `time.monotonic`) and what it shows. ``still(smaller)``
    returns what that shows, or None where it shows nothing."""
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for smaller in _smaller(workload):
            if time.monotonic() >= until:
                break
            shown = still(copy.deepcopy(smaller))
            if shown is not None:
                workload, found, progress = smaller, shown, True
                break
    return workload, found


def _smaller(workload: Any) -> Iterator[Any]:
    """Smaller workloads, the greatest steps first."""
    lists = [path for path, value in _walk(workload) if isinstance(value, list)]
    longest = max((len(_at(workload, path)) for path in lists), default=0)
    size = longest
    while size:
        for path in lists:
            whole = _at(workload, path)
            for start in range(0, len(whole) - size + 1, size) if len(whole) >= size else ():
                yield _replaced(workload, path, whole[:start] + whole[start + size :])
        size //= 2
    numbers = [(path, value) for path, value in _walk(workload) if type(value) is int and value > 0]
    for path, _ in numbers:
        yield _replaced(workload, path, 0)
    for path, value in numbers:
        if value > 1:
            yield _replaced(workload, path, value // 2)
    for path, value in numbers:
        yield _replaced(workload, path, value - 1)


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from _walk(part, (*path, key))


def _at(workload: Any, path: Path) -> Any:
    for key in path:
        workload = workload[key]
    return workload


def _replaced(workload: Any, path: Path, value: Any) -> Any:
    """A copy with ``value`` at ``path``; what is not on the path is shared."""
    if not path:
        return value
    changed = copy.copy(workload)
    changed[path[0]] = _replaced(workload[path[0]], path[1:], value)
    return changed
