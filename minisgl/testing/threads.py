"""Ranks as threads of one process that share a lock: who still runs, and what the first one to fail raised.

What they say to each other is the subclasses' (`minisgl.testing.meeting`, `minisgl.testing.wire`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["Gone", "RankThreads"]

T = TypeVar("T")


class Gone(Exception):  # noqa: N818
    """Another rank has failed: end quietly."""


class RankThreads:
    """``size`` ranks. ``_changed`` guards everything; a rank that waits for it raises `Gone` where there are errors."""

    def __init__(self, size: int):
        self.size = size
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._errors: list[BaseException] = []

    def _run(self, work: Callable[[int], T]) -> list[T]:
        """``work(rank)`` on each rank; the results in rank order. Raises what the first rank to fail raised."""
        results: dict[int, T] = {}

        def one(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = work(rank)
            except Gone:
                pass
            except BaseException as error:
                self._fail(error)
            finally:
                with self._changed:
                    self._running.discard(rank)
                    self._left(rank)

        self._running = set(range(self.size))
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # so that an alarm is heard
        self._ended()
        if self._errors:
            raise self._errors[0]
        return [results[rank] for rank in range(self.size)]

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._errors.append(error)
            self._changed.notify_all()

    def _left(self, rank: int) -> None:
        """A rank runs no more; the lock is held."""

    def _ended(self) -> None:
        """All have left; what was broken may still be found here."""
