"""`router=smg`: Shepherd Model Gateway (smg), the successor of SGLang's router. Install it by ``minisgl[cluster]``.

smg runs as a program of its own. This file starts it, and adds and removes replicas over its HTTP interface. smg keeps
an approximate tree of the texts that it has sent to each replica; it reads no KV events of HTTP servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.cluster.process import free_port
from minisgl.config import Config, ConfigError
from minisgl.hooks import hookimpl

# Every process of every server loads this file, so the HTTP libraries are imported where a router is built.
if TYPE_CHECKING:
    from minisgl.cluster.http_server import HttpServer
    from minisgl.cluster.options import ClusterConfig
    from minisgl.cluster.replica_process import ReplicaProcess
    from minisgl.cluster.status import ClusterStatus
    from minisgl.cluster.upstream import Upstream

log = logging.getLogger(__name__)

POLICIES = {"cache_aware": "cache_aware", "least_loaded": "least_load", "round_robin": "round_robin"}
"""Built-in routing policy → smg's name of the policy that is most like it."""
START_SECONDS = 60.0
"""Seconds that smg may take to start, or to add a replica."""
POLL_SECONDS = 0.1


@dataclass
class Smg:
    """Shepherd Model Gateway, of ``minisgl[cluster]``. It keeps an approximate tree of the texts of each replica."""

    arguments: list[str] = field(default_factory=list)
    """Further arguments of ``smg launch``, such as ``[--cache-threshold,0.5]``."""

    def build(self, cluster: ClusterConfig, status: ClusterStatus) -> SmgRouter:
        return SmgRouter(self, cluster, status)


class SmgRouter:
    """The router: a process that runs smg, and an HTTP server for the status of the cluster."""

    def __init__(self, config: Smg, cluster: ClusterConfig, status: ClusterStatus):
        if importlib.util.find_spec("smg") is None:
            raise ImportError("it needs the package smg: pip install 'minisgl[cluster]'", name="smg")
        defaults = type(cluster.server)()
        for name in ("root_path", "tls_cert", "max_connections", "io_timeout"):
            if (value := getattr(cluster.server, name)) != getattr(defaults, name):
                raise ConfigError(f"server.{name}={value}: not available with router=smg. Use router=exact.")
        self._config, self._cluster, self._status = config, cluster, status
        self._policy = _policy_of(cluster.routing)
        self._process: ReplicaProcess | None = None
        self._draining = False
        self._http: HttpServer | None = None
        self._api: Upstream | None = None
        self._metrics_api: Upstream | None = None
        self._metrics = ""
        self._workers: dict[int, tuple[str, str]] = {}  # replica -> the id of smg's worker, and its URL
        self._counted: dict[int, tuple[str, int]] = {}  # replica -> the last URL with requests, and those before it
        self.status_url = ""
        status.update = self._update
        status.router_metrics = lambda: self._metrics

    def options(self, index: int) -> list[str]:
        return []

    async def start(self) -> str:
        from minisgl.cluster.replica_process import ReplicaProcess
        from minisgl.cluster.upstream import Upstream
        from minisgl.server.serve import listen

        server = self._cluster.server
        await self._serve_status()
        # smg can't be given a socket. Try the address first, for an error that names the option.
        listener = listen(server.host, server.port)
        host, port = listener.getsockname()[:2]
        listener.close()
        metrics_port = free_port()
        line = json.dumps(self._arguments(host, port, metrics_port)).encode() + b"\n"
        command = [sys.executable, "-m", "minisgl.cluster.smg_process"]
        self._process = await ReplicaProcess.start("smg", command, {}, first_line=line)
        local = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self._metrics_api = Upstream("127.0.0.1", metrics_port)
        self._api = Upstream(local, port)
        await self._wait_until(self._answers, "smg did not start")
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _arguments(self, host: str, port: int, metrics_port: int) -> list[str]:
        """Return the arguments of smg."""
        server = self._cluster.server
        words = ["launch", "--host", host, "--port", str(port), "--policy", self._policy, "--log-level", "warn"]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        words += ["--shutdown-grace-period-secs", str(max(1, round(server.drain_timeout)))]
        words += ["--health-check-interval-secs", "2", "--max-concurrent-requests", str(server.max_queued)]
        if server.max_body is not None:
            words += ["--max-payload-size", str(server.max_body)]
        if server.api_key is not None:
            words += ["--api-key", server.api_key]
        if server.cors_origins:
            words += ["--cors-allowed-origins", *server.cors_origins]
        return [*words, *self._config.arguments]

    async def _serve_status(self) -> None:
        from minisgl.cluster.http_server import HttpServer
        from minisgl.cluster.status import StatusApp
        from minisgl.server.serve import listen

        listener = listen("127.0.0.1", self._cluster.status_port)
        self._http = HttpServer(StatusApp(self._status), listener, Config().server)
        await self._http.start()
        self.status_url = self._http.url

    # ---- smg's HTTP interface --------------------------------------------------------------------------------

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call smg's HTTP interface. Return the answer. Raise `UpstreamError` if it fails."""
        from minisgl.cluster.upstream import UpstreamError

        assert self._api is not None
        data = b"" if body is None else msgspec.json.encode(body)
        headers = [(b"host", b"smg"), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(data)).encode()))
        if self._cluster.server.api_key is not None:
            headers.append((b"authorization", f"Bearer {self._cluster.server.api_key}".encode()))
        response = await self._api.request(method.encode(), path.encode(), headers, data)
        answer = await response.body()
        response.close()
        if response.status >= 300:
            raise UpstreamError(f"smg answered {method} {path} with {response.status}: {answer.decode()[:200]}")
        return msgspec.json.decode(answer)

    async def _answers(self) -> bool:
        from minisgl.cluster.upstream import UpstreamError

        with contextlib.suppress(UpstreamError):
            await self._call("GET", "/workers")
            return True
        return False

    async def _wait_until(self, condition: Callable[[], Awaitable[bool]], failure: str) -> None:
        """Wait until ``await condition()`` is true. Raise RuntimeError if smg ends or takes too long."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while self._process.exit_status is None:
                    if await condition():
                        return
                    await asyncio.sleep(POLL_SECONDS)
        raise RuntimeError(f"{failure}. Its last lines:\n" + "\n".join(self._process.log))

    async def add(self, index: int, url: str) -> None:
        body: dict[str, Any] = {"url": url}
        if self._cluster.server.api_key is not None:
            body["api_key"] = self._cluster.server.api_key
        worker = (await self._call("POST", "/workers", body))["worker_id"]
        self._workers[index] = worker, url

        async def is_ready() -> bool:
            workers = (await self._call("GET", "/workers"))["workers"]
            return any(each["url"] == url and each["is_healthy"] for each in workers)

        await self._wait_until(is_ready, f"smg did not add replica-{index}")

    async def remove(self, index: int) -> None:
        worker, _ = self._workers.pop(index, ("", ""))
        if worker and not self._draining:
            await self._call("DELETE", f"/workers/{worker}")

    def set_healthy(self, index: int, healthy: bool) -> None:
        """Do nothing: smg checks the health of its workers itself."""

    async def drain(self, seconds: float) -> None:
        """Let smg end: it accepts no new requests and finishes the open ones. Then no replica needs to be removed."""
        self._draining = True
        if self._process is not None:
            self._process.terminate()
            await asyncio.wait({asyncio.ensure_future(self._process.wait())}, timeout=seconds + 1.0)

    async def wait_until_ended(self) -> str:
        assert self._process is not None
        return f"smg {await self._process.wait()}"

    async def close(self) -> None:
        if self._process is not None:
            await self._process.kill()
        for upstream in (self._api, self._metrics_api):
            if upstream is not None:
                upstream.close()
        if self._http is not None:
            await self._http.close()

    # ---- metrics ---------------------------------------------------------------------------------------------

    async def _update(self) -> None:
        """Read smg's metrics: those of each worker become those of its replica."""
        from minisgl.cluster.upstream import UpstreamError

        assert self._metrics_api is not None
        with contextlib.suppress(UpstreamError):
            response = await self._metrics_api.request(b"GET", b"/metrics", [(b"host", b"smg")], b"")
            self._metrics = (await response.body()).decode()
            response.close()
        for index, (_, url) in self._workers.items():
            status = self._status.replicas[index]
            before_url, before = self._counted.get(index, (url, 0))
            if before_url != url:  # the replica was started again: smg counts its requests from 0
                before = status.requests
            self._counted[index] = url, before
            status.requests = before + self._sample("smg_worker_requests_total", url)
            status.open_requests = self._sample("smg_worker_requests_active", url)

    def _sample(self, name: str, url: str) -> int:
        """Return the sum of a metric's samples of one worker."""
        lines = [line for line in self._metrics.splitlines() if line.startswith(f'{name}{{worker="{url}"')]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def _policy_of(routing: Any) -> str:
    """Return smg's name of a routing policy. Raise `ConfigError` for one that smg does not have."""
    package, _, module = type(routing).__module__.rpartition(".")
    name = POLICIES.get(module) if package == "minisgl.plugins.routing" else None
    if name is None or routing != type(routing)():
        raise ConfigError(
            "routing: smg has policies of its own. Choose routing=cache_aware, least_loaded or round_robin without "
            "further options, give smg's options by router.arguments=[…], or use router=exact."
        )
    return name


@hookimpl
def minisgl_configs() -> Any:
    yield "router", "smg", Smg
