"""Responses that the server remembers: `ResponseStore`, bounded in number and bytes, in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from minisgl.sampling_params import shorten
from minisgl.server.errors import ApiError

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20
"""The largest size of all stored responses, as JSON, each with the items of its whole conversation."""


class Stored(NamedTuple):
    """A response and the items of its conversation, both as JSON. ``num_input`` of the items are not its output."""

    response: bytes
    items: bytes
    num_input: int


class ResponseStore:
    """Responses by id. To make room for a new one, those that were used least recently are deleted."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def add(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store a response. ``items`` are those of its conversation without its output.

        A response that is larger than the whole store is not stored.
        """
        output = response["output"]
        new = Stored(msgspec.json.encode(response), msgspec.json.encode([*items, *output]), len(items))
        if _size(new) > self._max_bytes:
            return
        self._stored[response["id"]] = new
        self._num_bytes += _size(new)
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, old = self._stored.popitem(last=False)
            self._num_bytes -= _size(old)

    def get(self, response_id: str, param: str = "response_id") -> Stored:
        """Return a stored response. Raise `ApiError` (404) if there is none; ``param`` has the id."""
        found = self._stored.get(response_id)
        if found is None:
            message = (
                f"Response with id {shorten(repr(response_id))} not found: it was not stored, or has been replaced."
            )
            raise ApiError(404, message, param, "response_not_found")
        self._stored.move_to_end(response_id)
        return found

    def remove(self, response_id: str) -> None:
        """Remove a response. Raise `ApiError` (404) if there is none."""
        self._num_bytes -= _size(self.get(response_id))
        del self._stored[response_id]


def _size(stored: Stored) -> int:
    return len(stored.response) + len(stored.items)
