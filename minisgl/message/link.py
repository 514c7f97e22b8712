"""`Link`: what connects the two halves of a plugin, an observer in rank 0's process and an extension of the API server.

They exchange bytes on a *topic*, a name that both know. The bytes travel in a `Call`, by the queues of all other
messages, so they keep their order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from minisgl.core import Finished, InvalidRequestError
from minisgl.message import Call, Message

log = logging.getLogger(__name__)


class Link:
    """One end of the connections: that of all observers, or that of all extensions. ``put`` sends to the other end.

    ``receivers`` has for each topic the function that gets the other half's messages: an observer gets them between two
    steps. Each function of ``holds`` is asked before a step, and returns the seconds for which the step has to wait: 0
    if it may begin. The scheduler's loop goes on handling messages meanwhile, and then asks again.
    """

    def __init__(self, put: Callable[[Message], None]):
        self._put = put
        self.receivers: dict[str, Callable[[bytes], None]] = {}
        self.holds: list[Callable[[], float]] = []

    def send(self, topic: str, data: bytes) -> None:
        """Send bytes to the other half, which listens to ``topic``. It never blocks."""
        self._put(Call(f"{__name__}:deliver", [topic, data]))

    def hold(self) -> float:
        """Return the seconds for which the next step has to wait."""
        return max((hold() for hold in self.holds), default=0.0)


def deliver(process: Any, topic: str, data: bytes) -> None:
    """Hand bytes over in the other half's process. Ignore a topic without a receiver."""
    if (receiver := process.link.receivers.get(topic)) is not None:
        receiver(data)


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
