"""``/metrics`` in Prometheus' text format: the counts of the API server, of the scheduler and of the observers.

The API server asks the scheduler for its counts at each scrape, so the values are current. Every server has its own
Prometheus registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.message import Stats
from minisgl.server.dispatch import Dispatcher

_GAUGE_PREFIX = "num_"
"""The prefix of the scheduler's counts that rise and fall (gauges). All other counts only rise (counters)."""


class Metrics:
    """The metrics of one API server.

    ``plugin_calls()`` returns the call counts of the plugins, as tuples: process, plugin name, path, SHA-256, hook
    or method, number of calls.
    """

    def __init__(self, plugin_calls: Callable[[], Iterable[tuple[str, str, str, str, str, int]]] = tuple):
        self._plugin_calls = plugin_calls
        self._registry = CollectorRegistry()
        self.requests = Counter(
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

    async def text(self, dispatcher: Dispatcher) -> bytes:
        """Return all metrics with their current values. Raise `ApiError` (503) if the server is not running."""
        stats = await dispatcher.stats()
        self._open.set(dispatcher.num_open)
        for process, count in dispatcher.dropped.items():
            self._dropped.labels(process).set(count)
        scheduler = CollectorRegistry()
        scheduler.register(_SchedulerCounts(stats))
        scheduler.register(_PluginCalls(self._plugin_calls()))
        return generate_latest(self._registry) + generate_latest(scheduler) + stats.text.encode()


class CountRequests:
    """ASGI middleware that counts HTTP responses by route and status."""

    def __init__(self, app: ASGIApp, counter: Counter):
        self._app, self._counter = app, counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._counter.labels(route, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)


class _SchedulerCounts(Collector):
    """The scheduler's counts as Prometheus metrics."""

    def __init__(self, stats: Stats):
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for name, value in self._stats.values.items():
            family = GaugeMetricFamily if name.startswith(_GAUGE_PREFIX) else CounterMetricFamily
            yield family(f"minisgl_scheduler_{name}", name.replace("_", " "), value=value)


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
