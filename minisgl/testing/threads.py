"""Runs ranks as threads of one process: the results of all ranks, or the first error that a rank raised.

Subclasses implement the communication between the ranks: `minisgl.testing.meeting` (collectives) and
`minisgl.testing.wire` (point-to-point messages).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["RankStopped", "RankThreads"]

T = TypeVar("T")


class RankStopped(Exception):  # noqa: N818 - not an error: another rank has failed already
    """Raised in a rank that waits, after another rank has failed. It ends the waiting rank's thread."""


class RankThreads:
    """``size`` ranks, each a thread.

    The condition ``_changed`` guards all shared state. A rank that waits for ``_changed`` must raise `RankStopped` if
    ``_errors`` is not empty.
    """

    def __init__(self, size: int):
        self.size = size
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._errors: list[BaseException] = []

    def _run(self, work: Callable[[int], T]) -> list[T]:
        """Run ``work(rank)`` on each rank and return the results in rank order. Raise the earliest error."""
        results: dict[int, T] = {}

        def run_rank(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = work(rank)
            except RankStopped:
                pass
            except BaseException as error:
                self._fail(error)
            finally:
                with self._changed:
                    self._running.discard(rank)
                    self._on_rank_end(rank)

        self._running = set(range(self.size))
        threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # a short wait, so that Python runs signal handlers in between
        self._on_all_ended()
        if self._errors:
            raise self._errors[0]
        return [results[rank] for rank in range(self.size)]

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._errors.append(error)
            self._changed.notify_all()

    def _on_rank_end(self, rank: int) -> None:
        """Check the shared state after the thread of ``rank`` has ended. The caller holds the lock."""

    def _on_all_ended(self) -> None:
        """Check the shared state after all threads have ended. May append to ``_errors``."""
