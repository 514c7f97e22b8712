"""A second client for the OpenAI API's streams, to compare with `bench online`: sockets, and HTTP parsed by hand.

It shares no code with `minisgl.bench.loadgen`. One thread waits for all sockets, and only notes when which bytes
arrived; the bytes are parsed when all responses are complete. From the root of the project:

    python tests/bench/raw_client.py http://127.0.0.1:1919 --clients 8 --requests 64 --input 512 --output 128
    python tests/bench/raw_client.py http://127.0.0.1:1919 --rate 4 --requests 64
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

END_OF_BODY = b"0\r\n\r\n"


@dataclass
class Exchange:
    """One request and the bytes of its response: (time, bytes). Times are those of `time.perf_counter`."""

    request: bytes
    start: float = 0.0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    output_len: int = 0

    def parse(self) -> None:
        """Find the arrival of each token: the time of the read that completed its event."""
        status = self.parts[0][1].split(b" ", 2)[1]
        assert status == b"200", self.parts[0][1][:400]
        raw, ends = b"", []
        for at, data in self.parts:
            raw += data
            ends.append((len(raw), at))
        position = raw.index(b"\r\n\r\n") + 4
        body, arrivals = b"", []
        while True:
            line = raw.index(b"\r\n", position)
            size = int(raw[position:line], 16)
            if size == 0:
                break
            body += raw[line + 2 : line + 2 + size]
            position = line + 2 + size + 2
            arrivals.append((len(body), next(at for end, at in ends if end >= line + 2 + size)))
        self._read_events(body, arrivals)

    def _read_events(self, body: bytes, arrivals: list[tuple[int, float]]) -> None:
        position = 0
        for event in body.split(b"\n\n"):
            position += len(event) + 2
            if not event.startswith(b"data: {"):
                continue
            found = json.loads(event[6:])
            if found.get("choices"):
                self.tokens.append(next((at for end, at in arrivals if end >= position), arrivals[-1][1]))
            if found.get("usage"):
                self.output_len = found["usage"]["completion_tokens"]


class RawClient:
    """Sends requests to one server, and waits for all of them."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.address, self.base = (parts.hostname, parts.port), parts.path.rstrip("/")
        self.selector = selectors.DefaultSelector()
        self.idle: list[socket.socket] = []
        self.open = 0

    def request(self, body: dict[str, object]) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST {self.base}/v1/completions HTTP/1.1\r\nHost: raw\r\nContent-Length: {len(data)}\r\n"
        return f"{head}Content-Type: application/json\r\n\r\n".encode() + data

    def closed_loop(self, bodies: Sequence[dict[str, object]], clients: int) -> list[Exchange]:
        """Keep ``clients`` requests in flight until every body was sent and answered."""
        exchanges = [Exchange(self.request(body)) for body in bodies]
        for exchange in exchanges[:clients]:
            self._send(exchange)
        rest = iter(exchanges[clients:])
        while self.open:
            for _ in range(self._read(None)):
                if (following := next(rest, None)) is not None:
                    self._send(following)
        return self._parsed(exchanges)

    def at_times(self, bodies: Sequence[dict[str, object]], times: Sequence[float]) -> list[Exchange]:
        """Send each body at its time, in seconds from now."""
        exchanges = [Exchange(self.request(body)) for body in bodies]
        start = time.perf_counter()
        for exchange, due in zip(exchanges, times, strict=True):
            while (wait := start + due - time.perf_counter()) > 0:
                self._read(wait)
            self._send(exchange)
        while self.open:
            self._read(None)
        return self._parsed(exchanges)

    def _send(self, exchange: Exchange) -> None:
        exchange.start = time.perf_counter()
        connection = self.idle.pop() if self.idle else socket.create_connection(self.address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(exchange.request)
        self.selector.register(connection, selectors.EVENT_READ, exchange)
        self.open += 1

    def _read(self, timeout: float | None) -> int:
        """Read what has arrived. Return the number of responses that are now complete."""
        complete = 0
        if not self.open:
            time.sleep(timeout or 0.0)
            return 0
        for key, _ in self.selector.select(timeout):
            connection, exchange = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            data = connection.recv(2**16)
            assert data, "the server closed the connection"
            exchange.parts.append((time.perf_counter(), data))
            tail = b"".join(part for _, part in exchange.parts[-3:])
            if tail.endswith(END_OF_BODY):
                self.selector.unregister(connection)
                self.idle.append(connection)
                self.open -= 1
                complete += 1
        return complete

    def _parsed(self, exchanges: list[Exchange]) -> list[Exchange]:
        for exchange in exchanges:
            exchange.parse()
        return exchanges

    def close(self) -> None:
        for connection in self.idle:
            connection.close()
        self.selector.close()


def summary(exchanges: Sequence[Exchange], begin: float) -> dict[str, float]:
    """Return throughput and mean, median and p99 of the latencies in milliseconds."""
    last = max(exchange.tokens[-1] for exchange in exchanges)
    output = sum(exchange.output_len for exchange in exchanges)
    values = {
        "ttft": [e.tokens[0] - e.start for e in exchanges],
        "tpot": [(e.tokens[-1] - e.tokens[0]) / (e.output_len - 1) for e in exchanges if e.output_len > 1],
        "itl": [b - a for e in exchanges for a, b in zip(e.tokens, e.tokens[1:], strict=False)],
        "e2el": [e.tokens[-1] - e.start for e in exchanges],
    }
    found = {"output_throughput": output / (last - begin), "request_throughput": len(exchanges) / (last - begin)}
    for name, seconds in values.items():
        ordered = sorted(seconds)
        found[f"mean_{name}_ms"] = statistics.fmean(ordered) * 1e3
        found[f"median_{name}_ms"] = statistics.median(ordered) * 1e3
        found[f"p99_{name}_ms"] = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))] * 1e3
    return found


def bodies(count: int, model: str, input_len: int, output_len: int, vocab: int, seed: int) -> list[dict[str, object]]:
    """Return requests with random token ids."""
    rng = random.Random(seed)
    common: dict[str, object] = {
        "model": model, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return [{**common, "prompt": [rng.randrange(vocab) for _ in range(input_len)]} for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    for name, default in (("clients", 0), ("requests", 64), ("input", 512), ("output", 128), ("vocab", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second, evenly spaced")
    parser.add_argument("--seed", type=int, default=time.time_ns())
    parser.add_argument("--model", default="tutor")
    args = parser.parse_args()
    client = RawClient(args.url)
    asked = bodies(args.requests, args.model, args.input, args.output, args.vocab, args.seed)
    client.closed_loop(bodies(1, args.model, args.input, args.output, args.vocab, args.seed + 1), 1)  # warm-up
    begin = time.perf_counter()
    if args.clients:
        exchanges = client.closed_loop(asked, args.clients)
    else:
        exchanges = client.at_times(asked, [(i + 1) / args.rate for i in range(len(asked))])
    print(json.dumps(summary(exchanges, begin), indent=2))


if __name__ == "__main__":
    main()
