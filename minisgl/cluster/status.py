"""What a cluster reports of itself: ``/health``, ``/ready``, ``/replicas`` and ``/metrics``.

The supervisor changes the states, a router counts the requests, and both run in one event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.server.errors import ApiError
from minisgl.server.generate import Json

ReplicaState = Literal["starting", "ready", "unhealthy", "waiting", "given up", "stopped"]
"""``unhealthy``: it runs, but answers no health check. ``waiting``: it is dead, and is started again later."""
PATHS = ("/health", "/ready", "/replicas", "/metrics")


class ReplicaStatus(msgspec.Struct):
    """The state of one replica. ``requests`` and ``open_requests`` are those that the router sent to it."""

    replica: int
    state: ReplicaState = "starting"
    url: str = ""
    pid: int = 0
    devices: str = ""
    restarts: int = 0
    start_seconds: float = 0.0
    requests: int = 0
    open_requests: int = 0
    cached_blocks: int | None = None


@dataclass
class ClusterStatus:
    """The states of all replicas. ``stopping`` is the reason why no request is accepted any more, or empty.

    ``update`` brings the router's counts up to date; ``router_metrics`` returns its own metrics as text.
    """

    replicas: list[ReplicaStatus]
    stopping: str = ""
    retries: int = 0
    """Requests that were sent to another replica because the first one failed."""
    update: Callable[[], Awaitable[None]] | None = None
    router_metrics: Callable[[], str] = lambda: ""
    no_replica: str = field(default="No replica is ready: try again later.", repr=False)

    @property
    def num_ready(self) -> int:
        return sum(replica.state == "ready" for replica in self.replicas)

    def check_ready(self) -> None:
        """Raise `ApiError` (503) if the cluster is stopping or no replica is ready."""
        if self.stopping or not self.num_ready:
            raise ApiError(503, self.stopping or self.no_replica, headers={"retry-after": "1"})

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        families: dict[str, tuple[str, str, Callable[[ReplicaStatus], int]]] = {
            "up": ("gauge", "1 for a replica that is ready", lambda each: int(each.state == "ready")),
            "requests_total": ("counter", "Requests sent to the replica", lambda each: each.requests),
            "open_requests": ("gauge", "Requests of the replica without their final reply", lambda e: e.open_requests),
            "restarts_total": ("counter", "Times that the replica was started again", lambda each: each.restarts),
            "cached_blocks": ("gauge", "KV blocks that the replica has cached", lambda each: each.cached_blocks or 0),
        }
        lines = []
        for name, (kind, text, value) in families.items():
            full = f"minisgl_cluster_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
            lines += [f'{full}{{replica="{each.replica}"}} {value(each)}' for each in self.replicas]
        full = "minisgl_cluster_retries_total"
        lines += [f"# HELP {full} Requests that were sent to another replica", f"# TYPE {full} counter"]
        return "\n".join([*lines, f"{full} {self.retries}"]) + "\n" + self.router_metrics()

    async def response(self, path: str) -> Response:
        """Return the response to one of `PATHS`."""
        if self.update is not None and path in ("/metrics", "/replicas"):
            await self.update()
        try:
            if path == "/metrics":
                return Response(self.metrics(), media_type="text/plain; version=0.0.4")
            if path == "/replicas":
                return Json({"stopping": self.stopping, "retries": self.retries, "replicas": self.replicas})
            self.check_ready()
        except ApiError as error:
            return Json(error.body, error.status, error.headers)
        word = "ok" if path == "/health" else "ready"
        return Json({"status": word, "ready": self.num_ready, "replicas": len(self.replicas)})


class StatusApp:
    """An ASGI application that answers `PATHS` only, for a cluster whose router is another program."""

    def __init__(self, status: ClusterStatus):
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in PATHS and scope["method"] in ("GET", "HEAD"):
            response = await self._status.response(scope["path"])
        else:
            error = ApiError(404, f"Unknown request URL: only {', '.join(PATHS)} are here.", code="unknown_url")
            response = Json(error.body, error.status)
        await response(scope, receive, send)
