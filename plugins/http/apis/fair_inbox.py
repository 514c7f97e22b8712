"""The inbox of a tokenizer's process, once a request with several prompts has come: all requests take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minisgl.message import Abort, AnyMessage, Submit
from minisgl.message.queue import Pull

_OTHERS = 0
"""The queue of the messages that belong to no request with several choices."""


class FairInbox:
    """Receives the messages of ``pull``, so that the prompts of one HTTP request do not delay all other messages.

    A request may have a thousand prompts, each in a message, which take a tokenizer seconds. So there is a queue for
    each such request and one for all other messages, and a message is taken from one after the other. The messages of
    one queue keep their order, and no `Abort` overtakes its `Submit`. ``first`` has been received already.
    """

    def __init__(self, pull: Pull, first: AnyMessage):
        self._pull = pull
        self._queues: dict[int, deque[AnyMessage]] = {}  # by group, the next one first; no queue is empty
        self._add(first)

    def receive(self) -> AnyMessage:
        """Wait for a message, and return it."""
        for message in self._pull.drain(block=not self._queues):
            if isinstance(message, Abort):
                self._drop(message.uids)
            self._add(message)
        group, queue = next(iter(self._queues.items()))
        del self._queues[group]
        first = queue.popleft()
        if queue:
            self._queues[group] = queue
        return first

    def _add(self, message: AnyMessage) -> None:
        group = message.group if isinstance(message, Submit) else _OTHERS
        self._queues.setdefault(group, deque()).append(message)

    def _drop(self, uids: Sequence[int]) -> None:
        """Remove the prompts of aborted requests. The scheduler does not know them, and ignores their `Abort`."""
        aborted = set(uids)
        for group in [group for group in self._queues if group != _OTHERS]:
            kept = deque(m for m in self._queues[group] if not (isinstance(m, Submit) and aborted.issuperset(m.uids)))
            self._queues[group] = kept
            if not kept:
                del self._queues[group]
