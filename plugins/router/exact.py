"""`router=exact`: an HTTP proxy that knows from KV events which blocks each replica has cached.

The router tokenises each prompt as the servers do, computes the hashes of its blocks, and lets the routing policy
(``routing=``) choose a replica by what its cache contains. smg keeps an approximate tree of the texts that it has sent
to each replica instead: it does not see what a replica evicts.

`minisgl.cluster.prompt_reader` reads the prompts, `minisgl.cluster.kv_subscriber` follows the KV events, and
`minisgl.cluster.proxy` passes the requests on. This file connects them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.hooks import hookimpl
from minisgl.message.queue import make_folder, remove_folder

# Every process of every server loads this file, so the HTTP libraries are imported where a router is built.
if TYPE_CHECKING:
    from minisgl.cluster.http_server import HttpServer
    from minisgl.cluster.kv_subscriber import KVSubscriber
    from minisgl.cluster.options import ClusterConfig
    from minisgl.cluster.routing import RoutingPolicy
    from minisgl.cluster.status import ClusterStatus
    from minisgl.tokenizer.tokenizer import Tokenizer

INFO_SECONDS = 30.0
"""Seconds that a new replica has to answer ``/server_info``."""


@dataclass
class Exact:
    """minisgl's own router. It knows from KV events what each replica has cached. ``routing=`` is its policy."""

    def build(
        self,
        cluster: ClusterConfig,
        status: ClusterStatus,
        policy: RoutingPolicy,
        make_tokenizer: Callable[[], Tokenizer | None],
    ) -> ExactRouter:
        return ExactRouter(cluster, status, policy, make_tokenizer)


class ExactRouter:
    """The router: the proxy, its HTTP server, and a subscriber to the KV events of each replica."""

    def __init__(
        self,
        cluster: ClusterConfig,
        status: ClusterStatus,
        policy: RoutingPolicy,
        make_tokenizer: Callable[[], Tokenizer | None],
    ):
        from minisgl.cluster.prompt_reader import PromptReader
        from minisgl.cluster.proxy import Proxy

        self._cluster, self._status = cluster, status
        self._reader = PromptReader(make_tokenizer(), cluster.kv_events.hash_seed, cluster.server.api_key)
        server = cluster.server
        self._proxy = Proxy(policy, status, self._reader, server.body_limit(0), server.api_key, server.request_timeout)
        self.status_url = ""
        self._folder = make_folder()
        self._starts = 0
        self._endpoints: dict[int, tuple[str, str]] = {}  # replica -> where it publishes, and where it replays
        self._subscribers: dict[int, KVSubscriber] = {}
        self._http: HttpServer | None = None
        status.router_metrics = self._metrics

    def options(self, index: int) -> list[str]:
        """Return the addresses of the replica's KV events: new ones for each start, so that none is in use."""
        self._starts += 1
        base = f"ipc://{self._folder}/kv-{index}-{self._starts}"
        self._endpoints[index] = (base, f"{base}-replay")
        return [f"kv_events.endpoint={base}", f"kv_events.replay_endpoint={base}-replay"]

    async def start(self) -> str:
        from minisgl.cluster.http_server import HttpServer, observed
        from minisgl.server.serve import listen

        server = self._cluster.server
        listener = listen(server.host, server.port)
        self._http = HttpServer(observed(self._proxy, server), listener, server)
        await self._http.start()
        self.status_url = self._http.url
        return self._http.url

    async def add(self, index: int, url: str) -> None:
        from minisgl.cluster.kv_subscriber import KVSubscriber
        from minisgl.cluster.router import address_of

        info = await self._server_info(url)
        length = info["context_length"]
        self._reader.begin(info["page_size"], length)
        self._proxy.max_body = self._cluster.server.body_limit(length)
        replica = self._proxy.connect(index, *address_of(url), info["page_size"])
        self._subscribers[index] = KVSubscriber(*self._endpoints[index], replica.apply)

    async def _server_info(self, url: str) -> dict[str, Any]:
        """Return the sizes of a replica's engine, from ``/server_info``.

        Raise `UpstreamError` if the replica does not answer within `INFO_SECONDS`, or with an error.
        """
        from minisgl.cluster.router import address_of
        from minisgl.cluster.upstream import Upstream, UpstreamError

        key = self._cluster.server.api_key
        headers = [(b"host", b"replica"), *([] if key is None else [(b"authorization", f"Bearer {key}".encode())])]
        upstream = Upstream(*address_of(url))
        try:
            async with asyncio.timeout(INFO_SECONDS):
                response = await upstream.request(b"GET", b"/server_info", headers, b"")
                body = await response.body()
            response.close()
            if response.status != 200:
                raise UpstreamError(f"it answered /server_info with {response.status}")
            info: dict[str, Any] = msgspec.json.decode(body)
            return info
        except TimeoutError:
            raise UpstreamError(f"it did not answer /server_info within {INFO_SECONDS:g} s") from None
        finally:
            upstream.close()

    async def remove(self, index: int) -> None:
        self._proxy.disconnect(index)
        if (subscriber := self._subscribers.pop(index, None)) is not None:
            await subscriber.close()

    def set_healthy(self, index: int, healthy: bool) -> None:
        self._proxy.replicas[index].alive = healthy

    async def drain(self, seconds: float) -> None:
        await self._proxy.wait_until_idle(seconds)

    async def wait_until_ended(self) -> str:
        assert self._http is not None
        return await self._http.wait_until_ended()

    async def close(self) -> None:
        for index in list(self._subscribers):
            await self.remove(index)
        if self._http is not None:
            await self._http.close()
        self._reader.close()
        remove_folder(self._folder)

    def _metrics(self) -> str:
        name = "minisgl_cluster_routed_by_load_total"
        return (
            f"# HELP {name} Requests whose prompt the router could not read\n# TYPE {name} counter\n"
            f"{name} {self._reader.by_load}\n"
        )


@hookimpl
def minisgl_configs() -> Any:
    yield "router", "exact", Exact
