"""``/metrics`` in Prometheus' text format: the counts of the API server, of the scheduler and of the observers.

The API server asks the scheduler for its counts at each scrape, so the values are current. Every server has its own
Prometheus registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.core import PER_POSITION
from minisgl.message import Stats
from minisgl.server.dispatch import Dispatcher
from minisgl.server.generate import CLIENT_CLOSED_REQUEST
from minisgl.server.request_record import RequestRecord

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
