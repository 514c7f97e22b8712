"""``GET /metrics`` in Prometheus' text format: the counts of the API server, of the scheduler and of the observers.

At each request the scheduler and the other processes are asked for their counts, so the values are current.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.queries import ask_stats, ask_worker, own_counts
from minisgl.scheduler.steps import PER_POSITION
from minisgl.server.app import GET_OR_HEAD, Api
from minisgl.server.errors import CLIENT_CLOSED_REQUEST
from minisgl.server.extension import HttpExtension, Stats
from minisgl.server.request_record import RequestRecord

_GAUGE_PREFIX = "num_"
"""The prefix of the scheduler's counts that rise and fall (gauges). All other counts only rise (counters)."""
ANSWER_SECONDS = 0.25
"""Seconds that a busy process may take to report its counts. After that its last ones are given."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Metrics()


class Metrics(HttpExtension):
    """The route, and what the API server counts. Every server has its own Prometheus registry."""

    def __init__(self) -> None:
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
        self._answers: dict[str, Any] = {}  # the last counts of each worker, by its name: see `own_counts`
        self._asked: dict[str, asyncio.Future[Any]] = {}  # the answers that have not come

    def begin(self, api: Api) -> None:
        """Add the processes of the server, and the plugins that they loaded."""
        if api.launcher is None:
            return
        plugins = [(plugin.name, str(plugin.path), plugin.sha256) for plugin in api.launcher.plugin_manager.plugins]
        self._add_process("api", os.getpid(), plugins)
        for worker in api.launcher.worker_pool.workers:
            assert worker.ready is not None
            assert worker.process.pid is not None
            self._add_process(worker.role, worker.process.pid, worker.ready.plugins)

    def _add_process(self, role: str, pid: int, plugins: Iterable[tuple[str, str, str]]) -> None:
        self._processes.labels(role, pid).set(1)
        for plugin in plugins:
            self._plugins.labels(role, *plugin).set(1)

    def on_end(self, record: RequestRecord) -> None:
        """Count a response by route and status. A request without a response, of a client that has gone, is a 499."""
        self._requests.labels(record.route, record.status or CLIENT_CLOSED_REQUEST).inc()

    def add_probes(self, router: APIRouter, api: Api) -> None:
        @router.api_route("/metrics", methods=GET_OR_HEAD)
        async def read_metrics() -> Response:
            stats = await ask_stats(api.dispatcher)
            await self._ask_workers(api)
            texts = [self._text(api, stats), *(each.metrics(stats) for each in api.extensions)]
            return Response(b"".join(texts), media_type="text/plain; version=0.0.4")

    async def _ask_workers(self, api: Api) -> None:
        """Ask each worker for its counts, and wait for at most `ANSWER_SECONDS`."""
        for worker in api.dispatcher.workers:
            if worker not in self._asked:
                self._asked[worker] = asyncio.ensure_future(ask_worker(api.dispatcher, worker, own_counts))
        await asyncio.wait(self._asked.values(), timeout=ANSWER_SECONDS)
        for worker, answer in list(self._asked.items()):
            if answer.done():
                del self._asked[worker]
                if answer.exception() is None:
                    self._answers[worker] = answer.result()

    def _text(self, api: Api, stats: Stats) -> bytes:
        """Return all metrics with their current values. ``stats`` are the scheduler's counts."""
        self._open.set(api.dispatcher.num_open)
        self._dropped.labels("api").set(api.dispatcher.inbox.num_dropped)
        calls: dict[str, Any] = {}
        for worker, (num_dropped, plugin_calls) in self._answers.items():
            self._dropped.labels(worker).set(num_dropped)
            calls[worker] = plugin_calls
        if api.launcher is not None:
            calls["api"] = api.launcher.plugin_manager.call_counts()
        current = CollectorRegistry()
        current.register(_SchedulerCounts(stats))
        current.register(_PluginCalls(calls))
        return generate_latest(self._registry) + generate_latest(current) + stats.text.encode()


class _SchedulerCounts(Collector):
    """The scheduler's counts as Prometheus metrics."""

    def __init__(self, stats: Stats):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
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
    """The number of calls of each hook and method of the plugins that are not built in, as Prometheus metrics.

    ``calls`` are the counts of each process: plugin name, path, SHA-256, hook or method, number of calls.
    """

    def __init__(self, calls: Mapping[str, Iterable[tuple[str, str, str, str, int]]]):
        self._calls = calls

    def collect(self) -> Iterator[Metric]:
        labels = ["process", "plugin", "path", "sha256", "call"]
        family = CounterMetricFamily("minisgl_plugin_calls", "Calls of a plugin's hooks and methods", labels=labels)
        for process, calls in self._calls.items():
            for *plugin, times in calls:
                family.add_metric([process, *map(str, plugin)], times)
        yield family
