"""How the launcher notices a child that hangs without dying: a number in memory that the two share.

Knows nothing of what a turn does. Ranks above 0 have none: where one hangs, rank 0 soon waits for it, and hangs too.
"""

from __future__ import annotations

import asyncio
from multiprocessing.context import BaseContext


class Heartbeat:
    """The child's end, `beat` and `rest`, and the launcher's, `stopped`. No lock and no message: one writes a number
    (0.1 µs), the other looks at it now and then. It reaches the child as an argument of its process."""

    def __init__(self, context: BaseContext):
        self._shared = context.RawValue("Q", 0)  # 0: at rest, and so from the start until the first message
        self._beats = 0  # never the same number twice, or a short turn could look like the one before

    def beat(self) -> None:
        """Something was finished, and something else begins."""
        self._beats += 1
        self._shared.value = self._beats

    def rest(self) -> None:
        """Nothing is to be done until a message comes, however long that takes."""
        self._shared.value = 0

    async def stopped(self, seconds: float) -> None:
        """Return when ``seconds`` have gone by since a beat, with no other and no rest.

        What is counted are naps of this loop, not a clock: so long as the machine sleeps, or this process gets no
        turn itself, nothing is held against the child.
        """
        nap = min(1.0, seconds / 10)
        seen, naps = 0, 0
        while naps * nap < seconds:
            await asyncio.sleep(nap)
            now = self._shared.value
            naps = naps + 1 if now and now == seen else 0
            seen = now
