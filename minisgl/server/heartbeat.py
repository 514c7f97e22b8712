"""Hang detection: the launcher notices a child process that is alive but stuck.

A heartbeat is one number in memory that the child process and the launcher share. The tensor-parallel ranks from 1 on
have no heartbeat: if one of them hangs, rank 0 soon waits for it in a collective, and rank 0's heartbeat stops.
"""

from __future__ import annotations

import asyncio
from multiprocessing.context import BaseContext


class Heartbeat:
    """The child process calls `beat` and `idle`, and the launcher waits in `wait_until_hung`.

    There is no lock and no message: the child writes a number, which costs 0.1 µs, and the launcher reads it from time
    to time. The heartbeat reaches the child as an argument of its process.
    """

    def __init__(self, context: BaseContext):
        self._shared = context.RawValue("Q", 0)  # 0: the child is idle, as it is from its start to its first message
        self._beats = 0  # every beat writes a new number, so that two short units of work never look like one long one

    def beat(self) -> None:
        """Report that a unit of work (a step, a message) begins, and any earlier one is done. The child calls this."""
        self._beats += 1
        self._shared.value = self._beats

    def idle(self) -> None:
        """Report that the child now waits for a message, for any length of time. The child calls this."""
        self._shared.value = 0

    async def wait_until_hung(self, seconds: float) -> None:
        """Return once ``seconds`` have passed since the child's last beat without a new beat and without `idle`.

        The time is counted in sleeps of the launcher's event loop, not read off a clock. So the time while the machine
        is suspended, or while the launcher itself gets no CPU time, does not count.
        """
        interval = min(1.0, seconds / 10)
        last_seen, unchanged = 0, 0
        while unchanged * interval < seconds:
            await asyncio.sleep(interval)
            now = self._shared.value
            unchanged = unchanged + 1 if now and now == last_seen else 0
            last_seen = now
