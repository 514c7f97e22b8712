"""What the API server knows of each HTTP request, and the metrics.

`RequestMiddleware`, the outermost ASGI application, makes a record for every request and closes it. It surrounds the
routes and their error handlers, so it sees every response that is made from a parsed request, also that to an unknown
URL and that after an error in a route. The routes and the responses fill in the record.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.core import PER_POSITION, Finished, SamplingParams, shorten
from minisgl.message import Delta, Stats
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import CLIENT_CLOSED_REQUEST

log = logging.getLogger(__name__)

_GAUGE_PREFIX = "num_"
"""The prefix of the scheduler's counts that rise and fall (gauges). All other counts only rise (counters)."""
_KEY = "minisgl.record"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Generation:
    """The progress of the generation that an HTTP request asked for, over all its choices.

    ``uids`` are the choices' requests, as in `Stream`, which calls `add`. ``response_id`` is the field ``id`` of the
    response. ``error`` is the message of the first choice that failed, or empty.
    """

    def __init__(self, *, chat: bool, response_id: str, params: SamplingParams, uids: Sequence[int], arrival: float):
        self.chat, self.response_id, self.params, self.uids, self.arrival = chat, response_id, params, uids, arrival
        self.error = ""
        self.output_tokens = 0
        self.first_token: float | None = None  # seconds from the arrival to the first token of any choice
        self.ends: list[Finished | None] = [None] * len(uids)
        self.timer: asyncio.TimerHandle | None = None  # aborts the requests after server.request_timeout

    @property
    def prompt_tokens(self) -> int | None:
        """The tokens of all prompts, or None unless the first choice of each has ended without an error.

        The choices of a prompt share it.
        """
        tokens = 0
        for end in self.ends[:: self.params.n]:
            if end is None or end.finish_reason == "error":
                return None
            tokens += end.prompt_tokens
        return tokens

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended, in order. A choice that was aborted has "abort"."""
        return ["abort" if end is None else end.finish_reason for end in self.ends]

    def add(self, index: int, delta: Delta) -> None:
        """Count the new tokens, and the end, of choice ``index``."""
        self.output_tokens += len(delta.tokens)
        if delta.tokens and self.first_token is None:
            self.first_token = time.monotonic() - self.arrival
        if delta.finish is not None and self.ends[index] is None:
            self.ends[index] = delta.finish
            if delta.finish.finish_reason == "error":
                self.error = self.error or delta.finish.error

    def close(self) -> None:
        """Stop the timer. A choice without an end counts as aborted."""
        if self.timer is not None:
            self.timer.cancel()
        if None in self.ends:
            self.error = self.error or "The client disconnected."


@dataclass
class RequestRecord:
    """One HTTP request, from its arrival to the end of its response.

    ``path`` is percent-encoded and without the query, which may hold secrets. ``arrival`` is a time of
    `time.monotonic`, ``arrival_ns`` one of `time.time_ns`. ``status`` is 0 until the response begins. ``error`` says
    why the request failed, also if the response had begun; it is empty if it did not fail.
    """

    id: str
    method: str
    path: str
    client: str
    headers: Headers
    arrival: float = field(default_factory=time.monotonic)
    arrival_ns: int = field(default_factory=time.time_ns)
    status: int = 0
    route: str = "unknown"
    error: str = ""
    generation: Generation | None = None

    @staticmethod
    def begin(scope: Scope) -> RequestRecord:
        """Return a new record for the request of an ASGI scope, and keep it in the scope for `record_of`."""
        headers = Headers(scope=scope)
        client = scope.get("client")
        record = RequestRecord(
            id=request_id(headers.get("x-request-id")),
            method=shorten(scope["method"], 20),
            path=shorten(quote(scope["path"])),
            client=shorten(client[0]) if client else "",
            headers=headers,
        )
        scope[_KEY] = record
        return record

    @property
    def seconds(self) -> float:
        """The time since the request arrived."""
        return time.monotonic() - self.arrival


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request whose ASGI scope this is."""
    record = scope[_KEY]
    assert isinstance(record, RequestRecord)
    return record


def request_id(given: str | None) -> str:
    """Return the request id that the client gave, or a new one if the client gave none that can be used.

    An id has 1 to 128 letters, digits and characters of ``._:/+=@-``, so that it can't add a line to a log.
    """
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class RequestMiddleware:
    """ASGI middleware around all others.

    The response gets the header ``X-Request-Id``. After a 500 it gets ``Connection: close`` too: a request failed in a
    way that the server does not know, so no other request should use its connection. Each function of ``on_end`` is
    called with the record of a request whose response has ended.
    """

    def __init__(self, app: ASGIApp, on_end: Sequence[Callable[[RequestRecord], None]]):
        self._app, self._on_end = app, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                added = [(b"x-request-id", record.id.encode())]
                if record.status == 500:
                    added.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            record.error = type(error).__name__
            log.exception("a request failed", extra={"fields": {"request_id": record.id}})
            if not record.status:
                raise
            # The response has begun. If it is not complete, the HTTP server closes the connection.
        finally:
            self._end(scope, record)

    def _end(self, scope: Scope, record: RequestRecord) -> None:
        record.route = getattr(scope.get("route"), "path", "unknown")
        if record.generation is not None:
            record.generation.close()
            record.error = record.error or record.generation.error
        for call in self._on_end:
            call(record)


# ---- metrics ---------------------------------------------------------------------------------------------------


class Metrics:
    """``/metrics`` in Prometheus' text format: the counts of the API server, of the scheduler and of the observers.

    The API server asks the scheduler for its counts at each scrape, so the values are current. Every server has its own
    Prometheus registry.

    ``plugin_calls()`` returns the call counts of the plugins, as tuples: process, plugin name, path, SHA-256, hook
    or method, number of calls.
    """

    def __init__(self, plugin_calls: Callable[[], Iterable[tuple[str, str, str, str, str, int]]] = tuple):
        self._plugin_calls = plugin_calls
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "minisgl_http_requests", "HTTP requests answered", ["route", "status"], registry=self._registry
        )
        self._open = Gauge("minisgl_open_requests", "Requests without their final reply", registry=self._registry)
        self._dropped = Gauge(
            "minisgl_dropped_messages",
            "Bytes on a process's socket that were no message",
            ["process"],
            registry=self._registry,
        )
        self._processes = Gauge("minisgl_process", "1 for each process", ["process", "pid"], registry=self._registry)
        self._plugins = Gauge(
            "minisgl_plugin",
            "1 for each plugin that a process has loaded",
            ["process", "plugin", "path", "sha256"],
            registry=self._registry,
        )

    def add_process(self, role: str, pid: int, plugins: Iterable[tuple[str, str, str]] = ()) -> None:
        """Add a process of the server, and the plugins that it loaded, each as name, path and SHA-256."""
        self._processes.labels(role, pid).set(1)
        for plugin in plugins:
            self._plugins.labels(role, *plugin).set(1)

    def count_request(self, record: RequestRecord) -> None:
        """Count a response by route and status. A request without a response, of a client that has gone, is a 499."""
        self._requests.labels(record.route, record.status or CLIENT_CLOSED_REQUEST).inc()

    def text(self, dispatcher: Dispatcher, stats: Stats) -> bytes:
        """Return all metrics with their current values. ``stats`` are the scheduler's counts."""
        self._open.set(dispatcher.num_open)
        for process, count in dispatcher.dropped.items():
            self._dropped.labels(process).set(count)
        scheduler = CollectorRegistry()
        scheduler.register(_SchedulerCounts(stats))
        scheduler.register(_PluginCalls(self._plugin_calls()))
        return generate_latest(self._registry) + generate_latest(scheduler) + stats.text.encode()


class _SchedulerCounts(Collector):
    """The scheduler's counts as Prometheus metrics."""

    def __init__(self, stats: Stats):
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        positions = CounterMetricFamily(
            f"minisgl_scheduler_{PER_POSITION[:-1]}", "accepted draft tokens by position", labels=["position"]
        )
        for name, value in self._stats.values.items():
            if name.startswith(PER_POSITION):
                positions.add_metric([name.removeprefix(PER_POSITION)], value)
                continue
            family = GaugeMetricFamily if name.startswith(_GAUGE_PREFIX) else CounterMetricFamily
            yield family(f"minisgl_scheduler_{name}", name.replace("_", " "), value=value)
        if positions.samples:
            yield positions


class _PluginCalls(Collector):
    """The number of calls of each hook and method of the plugins that are not built in, as Prometheus metrics."""

    def __init__(self, calls: Iterable[tuple[str, str, str, str, str, int]]):
        self._calls = calls

    def collect(self) -> Iterable[Metric]:
        labels = ["process", "plugin", "path", "sha256", "call"]
        family = CounterMetricFamily("minisgl_plugin_calls", "Calls of a plugin's hooks and methods", labels=labels)
        for *values, times in self._calls:
            family.add_metric(values, times)
        yield family
