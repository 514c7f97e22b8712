"""``/metrics`` in Prometheus' text format: what the API server counts, what the scheduler counts, what observers add.

The scheduler is asked at each scrape, so what is read is current. Every server has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.message import Stats
from minisgl.server.dispatch import Dispatcher

_NOW = ("waiting", "running", "unread_steps", "pages")
"""How the names of counts begin that go up and down; all others only rise."""


class Metrics:
    """What one API server counts. ``calls`` tells how often plugins were called: process, plugin, path, SHA-256, what
    was called, and how often."""

    def __init__(self, calls: Callable[[], Iterable[tuple[str, str, str, str, str, int]]] = tuple):
        self._calls = calls
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "minisgl_http_requests", "HTTP requests answered", ["route", "status"], registry=self._registry
        )
        self._open = Gauge("minisgl_open_requests", "Requests without their final reply", registry=self._registry)
        self._processes = Gauge("minisgl_process", "1 for each process", ["process", "pid"], registry=self._registry)
        self._plugins = Gauge(
            "minisgl_plugin",
            "1 for each plugin that a process has loaded",
            ["process", "plugin", "path", "sha256"],
            registry=self._registry,
        )

    def process(self, role: str, pid: int, plugins: Iterable[tuple[str, str, str]] = ()) -> None:
        """Tell of a process and of the plugins in it, each as name, path and SHA-256."""
        self._processes.labels(role, pid).set(1)
        for plugin in plugins:
            self._plugins.labels(role, *plugin).set(1)

    async def text(self, dispatcher: Dispatcher) -> bytes:
        """Everything, as it is now. Raises `ApiError` (503) where the scheduler can't be asked."""
        stats = await dispatcher.stats()
        self._open.set(dispatcher.open)
        scheduler = CollectorRegistry()
        scheduler.register(_Counts(stats))
        scheduler.register(_PluginCalls(self._calls()))
        return generate_latest(self._registry) + generate_latest(scheduler) + stats.text.encode()


class CountRequests:
    """Middleware that counts answers by route and status."""

    def __init__(self, app: ASGIApp, counter: Counter):
        self._app, self._counter = app, counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._counter.labels(route, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)


class _Counts(Collector):
    """The scheduler's own counts as metrics."""

    def __init__(self, stats: Stats):
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for name, value in self._stats.values.items():
            family = GaugeMetricFamily if name.startswith(_NOW) else CounterMetricFamily
            yield family(f"minisgl_scheduler_{name}", name.replace("_", " "), value=value)


class _PluginCalls(Collector):
    """How often each process has called the plugins that are not built in."""

    def __init__(self, calls: Iterable[tuple[str, str, str, str, str, int]]):
        self._calls = calls

    def collect(self) -> Iterable[Metric]:
        labels = ["process", "plugin", "path", "sha256", "call"]
        family = CounterMetricFamily("minisgl_plugin_calls", "Calls of a plugin's hooks and methods", labels=labels)
        for *labelled, times in self._calls:
            family.add_metric(labelled, times)  # type: ignore[arg-type]
        yield family
