"""Ends a process together with the process that started it, however that one ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["when_input_closes", "when_parent_ends"]


def when_input_closes(end: Callable[[], object]) -> None:
    """Call ``end`` in another thread when the standard input of this process is closed. Returns at once.

    The parent holds a pipe to the standard input of its child. The operating system closes it however the parent ends.
    """

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin.read: the program must not exit while a thread holds sys.stdin's lock
            pass
        end()

    threading.Thread(target=wait, daemon=True).start()


def when_parent_ends(end: Callable[[], object], poll_seconds: float, parent: int = 0) -> None:
    """Call ``end`` in another thread when the process with the id ``parent`` has ended. Returns at once.

    It is the process that started this one, by default the one that is its parent now. The thread looks for it every
    ``poll_seconds``.
    """
    parent = parent or os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(poll_seconds)
        end()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
