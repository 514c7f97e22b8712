"""Shares of the open requests: how many each client has, and whose are ended when a new client finds no room.

A client is an address. Each of its HTTP requests is a `Stream`, which may have many open requests: its choices. As long
as there is room, every client may have any number of them. When there is none, the client with the most open requests
makes room for one with fewer (in routers: longest queue drop), and of one client, the HTTP request with the most
choices for a smaller one. So neither one HTTP request nor one client keeps all others out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.app import Api
from minisgl.server.dispatch import Dispatcher
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import Stream


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Shares(config.server.max_queued)


DISPLACED = (
    "The server has too many open requests (server.max_queued), of which this client or this request had more than its "
    "share: try again later, or with fewer prompts or a smaller n."
)
"""The error message of a request that was ended to make room."""


class Shares(HttpExtension):
    """Decides whose requests end when there is no room. ``max_open`` is the largest number of open requests."""

    def __init__(self, max_open: int):
        self._max_open = max_open

    def begin(self, api: Api) -> None:
        self.attach(api.dispatcher)

    def attach(self, dispatcher: Dispatcher) -> None:
        """End requests of ``dispatcher`` from now on, where it has no room for new ones."""

        def make_room(client: str, count: int, missing: int) -> None:
            num_open = {stream: stream.num_open for stream, _ in dispatcher.requests.values()}
            for stream in self.to_end(client, count, missing, num_open):
                dispatcher.end(stream, DISPLACED, 503)

        dispatcher.make_room = make_room

    def to_end(self, client: str, count: int, missing: int, num_open: Mapping[Stream, int]) -> Sequence[Stream]:
        """Return streams to end because the server has ``missing`` too few places for ``count`` requests of ``client``.

        ``num_open`` has the number of open requests of each stream, the oldest stream first. Return nothing to let the
        new requests be refused.
        """
        by_client: dict[str, int] = {}
        for stream, number in num_open.items():  # some thousands: a Counter would be slower
            by_client[stream.client] = by_client.get(stream.client, 0) + number
        own = by_client.pop(client, 0)
        most, name = max(((number, name) for name, number in by_client.items()), default=(0, ""))
        if most - missing > own + count:
            return _largest(name, missing, num_open)
        streams = [stream for stream, number in num_open.items() if number > 1 and stream.client == client]
        if not streams:
            return []
        largest = max(streams, key=lambda stream: num_open[stream])
        num_streams = len(streams) + own - sum(num_open[stream] for stream in streams)  # the others have one each
        share = self._max_open // (num_streams + 1)
        return [largest] if num_open[largest] > share and num_open[largest] - missing > count else []


def _largest(client: str, missing: int, num_open: Mapping[Stream, int]) -> list[Stream]:
    """Return a client's streams with the most open requests, the youngest first, until they have ``missing``."""
    ended = []
    youngest_first = [stream for stream in num_open if stream.client == client][::-1]
    for stream in sorted(youngest_first, key=lambda stream: -num_open[stream]):
        ended.append(stream)
        missing -= num_open[stream]
        if missing <= 0:
            break
    return ended
