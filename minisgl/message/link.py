"""`Link`: what connects an observer, in rank 0's process, with an extension of the API server.

The two halves of a plugin exchange bytes on a *topic*, a name that both know. The bytes travel in `PluginMessage`, by
the queues of all other messages, so they keep their order. An extension may also have a tokenizer or the scheduler call
a function (`answer_query`).
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable

from minisgl.core import Finished, InvalidRequestError
from minisgl.message import Answer, Message, PluginMessage, Query

log = logging.getLogger(__name__)


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


def refusal(uid: int, error: InvalidRequestError) -> Finished:
    """Return the end of a refused request, as the worker processes report it to the API server."""
    return Finished(uid, "error", error=error.message, status=400, field=error.field, code=error.code)


def attempt(work: Callable[[], None], uid: int, request_id: str = "") -> Finished | None:
    """Run ``work()`` in a worker process, and return None, or the end of the request or query if it raises an error.

    So one bad request never stops the process. ``uid`` and ``request_id`` name the request in the log.
    """
    try:
        work()
    except InvalidRequestError as error:
        return refusal(uid, error)
    except Exception as error:
        log.exception("a request failed", extra={"fields": {"uid": uid, "request_id": request_id}})
        return Finished(uid, "error", error=f"The request failed: {type(error).__name__}: {error}")
    return None


def answer_query(query: Query, worker: object) -> Answer:
    """Return the answer of a worker process to a query, whose function gets ``worker``."""
    answer = Answer(query.uid)

    def work() -> None:
        answer.value = pkgutil.resolve_name(query.function)(worker, *query.arguments)

    answer.error = attempt(work, query.uid)
    return answer
