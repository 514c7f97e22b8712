"""Shrinks a failing workload: removes list elements, then lowers integers (delta debugging, Zeller 2002).

A workload is JSON. This module does not know what its entries mean; the gate rejects meaningless workloads. Shrinking
is deterministic.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Found = TypeVar("Found")
Path = tuple[Any, ...]


def smallest(workload: Any, found: Found, still: Callable[[Any], Found | None], until: float) -> tuple[Any, Found]:
    """Return the smallest failing workload found before ``until`` (a time of `time.monotonic`), and its finding.

    ``still(smaller)`` returns the finding if the smaller workload still fails, otherwise None.
    """
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
    """Yield smaller workloads, those with the largest reduction first."""
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
    """Return a copy with ``value`` at ``path``. Values off the path are shared with the original."""
    if not path:
        return value
    changed = copy.copy(workload)
    changed[path[0]] = _replaced(workload[path[0]], path[1:], value)
    return changed
