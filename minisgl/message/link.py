"""`Link`: what connects an observer, in rank 0's process, with an extension of the API server.

The two halves of a plugin exchange bytes on a *topic*, a name that both know. The bytes travel in `PluginMessage`, by
the queues of all other messages, so they keep their order.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl.message import Message, PluginMessage


class Link:
    """The end of the connections in rank 0's process. ``send`` sends a message to the API server.

    ``receivers`` has for each topic the function that gets the extension's messages, between two steps. Each function
    of ``holds`` is asked before a step, and returns the seconds for which the step has to wait: 0 if it may begin. The
    scheduler's loop goes on handling messages meanwhile, and then asks again.
    """

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self.receivers: dict[str, Callable[[bytes], None]] = {}
        self.holds: list[Callable[[], float]] = []

    def send(self, topic: str, data: bytes) -> None:
        """Send bytes to the extension that listens to ``topic``. It never blocks."""
        self._send(PluginMessage(topic, data))

    def receive(self, message: PluginMessage) -> None:
        """Hand over a message of an extension. Ignore a topic without a receiver."""
        receiver = self.receivers.get(message.topic)
        if receiver is not None:
            receiver(message.data)

    def hold(self) -> float:
        """Return the seconds for which the next step has to wait."""
        return max((hold() for hold in self.holds), default=0.0)
