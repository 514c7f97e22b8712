"""Ends a process together with the process that started it.

The parent holds a pipe to the standard input of its child. The operating system closes it however the parent ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["when_input_closes"]


def when_input_closes(end: Callable[[], object]) -> None:
    """Call ``end`` in another thread when the standard input of this process is closed. Returns at once."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin.read: the program must not exit while a thread holds sys.stdin's lock
            pass
        end()

    threading.Thread(target=wait, daemon=True).start()
