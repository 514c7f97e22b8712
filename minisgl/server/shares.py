"""Shares of the open requests: how many each client has, and whose are ended when a new client finds no room.

A client is an address. Each of its HTTP requests is a `Stream`, which may have many open requests: its choices. As long
as there is room, every client may have any number of them. When there is none, the client with the most open requests
makes room for one with fewer (in routers: longest queue drop), and of one client, the HTTP request with the most
choices for a smaller one. So neither one HTTP request nor one client keeps all others out.
"""

from __future__ import annotations

from collections import Counter

from minisgl.server.stream import Stream

DISPLACED = (
    "The server has too many open requests (server.max_queued), of which this client or this request had more than its "
    "share: try again later, or with fewer prompts or a smaller n."
)
"""The error message of a request that was ended to make room."""
MAX_N = 128
"""The largest ``n``."""


def default_choices(max_open: int) -> int:
    """Return the default of ``server.max_choices``: a quarter of the open requests, but not less than the largest n."""
    return min(max_open, max(MAX_N, max_open // 4))


class Shares:
    """The open requests by client. ``max_open`` is the largest number of all of them."""

    def __init__(self, max_open: int):
        self._max_open = max_open
        self._num_open: Counter[str] = Counter()  # open requests by client; no entry is 0
        self._streams: dict[str, dict[Stream, int]] = {}  # the same by client and stream, the oldest stream first

    def add(self, stream: Stream) -> None:
        """Add a stream, all of whose requests are open."""
        self._num_open[stream.client] += len(stream.uids)
        self._streams.setdefault(stream.client, {})[stream] = len(stream.uids)

    def remove(self, stream: Stream, count: int) -> None:
        """Remove ``count`` open requests of a stream."""
        streams = self._streams[stream.client]
        streams[stream] -= count
        if not streams[stream]:
            del streams[stream]
        self._num_open[stream.client] -= count
        if not streams:
            del self._num_open[stream.client], self._streams[stream.client]

    def over_share(self, client: str, count: int, missing: int) -> list[Stream]:
        """Return streams that must end so that ``count`` new requests of ``client`` fit; an empty list: they may not.

        ``missing`` is the number of open requests that must end.
        """
        own = self._num_open.get(client, 0)
        others = [(number, name) for name, number in self._num_open.items() if name != client]
        most, name = max(others, default=(0, ""))
        if most - missing > own + count:
            return self._largest(name, missing)
        streams = self._streams.get(client, {})
        if own == len(streams):  # none, or one request each
            return []
        largest = max(streams, key=lambda stream: streams[stream])
        share = self._max_open // (len(streams) + 1)
        return [largest] if streams[largest] > share and streams[largest] - missing > count else []

    def _largest(self, client: str, missing: int) -> list[Stream]:
        """Return a client's streams with the most open requests, the youngest first, until they have ``missing``."""
        streams = self._streams[client]
        ended = []
        youngest_first = list(streams)[::-1]
        for stream in sorted(youngest_first, key=lambda stream: -streams[stream]):
            ended.append(stream)
            missing -= streams[stream]
            if missing <= 0:
                break
        return ended
