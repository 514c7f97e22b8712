"""minisgl on Ray Serve: replicas on the nodes of a Ray cluster, scaled by their load, with minisgl's routing policies.

    serve run minisgl.cluster.ray_serve:build options="model=tutor" max_replicas=2

The application has two deployments. Each replica of `Engine` runs one server (``python -m minisgl``) with all its
processes as children, on the GPUs that Ray gave it. `Ingress` reads requests, and passes each one on to an engine
through a handle. Ray Serve asks `PolicyRouter` which engine gets it: minisgl's routing policy (``routing=``) chooses,
by the KV events of the engines. `docs/operation/ray.md` says when to use this; one machine needs no Ray.

    Ray's HTTP proxy → Ingress (`HandleRelay`) → handle with `PolicyRouter` → Engine → server

The handle and its router are in the process of the ingress: the router runs in a thread of its own. A `Call` connects
the two. Only its fields for the engine are sent there.

The interface of request routers (``ray.serve.request_router``) is in alpha, so ``minisgl[ray]`` pins Ray's minor
version.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pydantic
import ray
import ray.exceptions
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response as StarletteResponse
from starlette.types import Message, Receive, Scope, Send

from minisgl.cluster.cluster import SERVER
from minisgl.cluster.http_server import observed
from minisgl.cluster.kv_subscriber import KVSubscriber
from minisgl.cluster.options import OWN_OPTIONS, ROUTER_ONLY, ClusterConfig
from minisgl.cluster.process import free_port
from minisgl.cluster.prompt_reader import PromptReader
from minisgl.cluster.relay import Attempt, PromptView, Relay
from minisgl.cluster.replica_process import ReplicaProcess
from minisgl.cluster.router import address_of
from minisgl.cluster.routing import Replica, RoutingPolicy
from minisgl.cluster.supervisor import END_SECONDS, UNHEALTHY_SECONDS, is_healthy
from minisgl.cluster.upstream import Upstream, UpstreamError
from minisgl.config import ROUTER_GROUPS, Config, ConfigError
from minisgl.models.resolve import resolve_model
from minisgl.options.compose import compose, split_plugins
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.errors import ApiError
from minisgl.tokenizer.tokenizer import build_tokenizer
from minisgl.utils.log import setup_logging

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

HEALTH_SECONDS = 2.0
"""Seconds between two health checks of an engine by Ray Serve, which replaces it after three bad ones in a row."""
HEALTH_TIMEOUT_SECONDS = 60.0
"""Seconds without an answer of the actor to a health check after which it counts as bad."""
STATS_SECONDS = 2.0
"""Seconds between two reports of an engine to the routers: a new engine's KV events are followed from the first on."""
INFO_POLL_SECONDS = 1.0
NOT_AVAILABLE = frozenset(
    {*ROUTER_ONLY, "server.root_path", "server.cors_origins", "replicas", "restart_limit", "status_port"}
)
"""Options of a server or a cluster that Ray Serve's configuration has instead. ``trace`` names one file for all."""
PROXY_HEADERS = (b"date", b"server", b"x-request-id")
"""Headers that Ray's HTTP proxy adds to each response."""
INGRESS_REQUESTS = 10_000
"""The largest number of open requests of an ingress replica."""


class Options(pydantic.BaseModel, extra="forbid"):
    """The arguments of the application: ``serve run minisgl.cluster.ray_serve:build NAME=VALUE …``."""

    options: str | list[str] = ""
    """The options of ``python -m minisgl``, and ``routing=``, as on a command line: ``"model=tutor routing=…"``."""
    num_gpus: int = 0
    """GPUs of each replica: 0 for a CPU, or as many as ``tp``. They are on one node."""
    num_cpus: float = 1.0
    """CPU cores of each replica. On a CPU, it is the number of threads that compute."""
    min_replicas: int = 1
    """Replicas without load."""
    max_replicas: int = 1
    """The largest number of replicas."""
    target_ongoing_requests: float = 32.0
    """Open requests for each replica, running and queued, by which Ray Serve chooses the number of replicas."""
    max_ongoing_requests: int = 256
    """The largest number of open requests of a replica. When all replicas have it, further ones wait in the ingress."""
    upscale_delay_s: float = 10.0
    """Seconds with more load before replicas are added."""
    downscale_delay_s: float = 300.0
    """Seconds with less load before replicas are removed."""
    look_back_period_s: float = 30.0
    """Seconds over which the load is averaged."""
    kv_events: bool = True
    """Whether engines publish their KV events to the ingress, over TCP without encryption: prompts are in them. Without
    them, routing knows only the open requests."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.options) if isinstance(self.options, str) else list(self.options)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application. ``arguments`` are those of `Options`.

    Raise `ConfigError` for a wrong option, and a ValueError for a wrong argument, before anything is deployed.
    """
    options = Options.model_validate(arguments)
    config, _ = compose_options(options.words)
    check(options, config)
    engine = serve.deployment(
        name="Engine",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=options.max_ongoing_requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
            look_back_period_s=options.look_back_period_s,
        ),
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        # A replica that is removed finishes its open requests first. Then its server has some seconds to end.
        graceful_shutdown_timeout_s=config.server.drain_timeout + 2 * END_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=PolicyRouter,
            request_router_kwargs={"words": options.words},
            request_routing_stats_period_s=STATS_SECONDS,
        ),
    )(Engine).bind(options.words, options.num_gpus, options.kv_events)
    ingress = serve.deployment(
        name="Ingress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=INGRESS_REQUESTS
    )(Ingress)
    return ingress.bind(options.words, engine)


def compose_options(words: Sequence[str]) -> tuple[ClusterConfig, PluginManager]:
    """Return the config of the options, and the plugin manager. Raise `ConfigError` for a wrong option."""
    manager = PluginManager.load(split_plugins(words)[0], light=True)
    return compose(manager, words, ClusterConfig), manager


def check(options: Options, config: ClusterConfig) -> None:
    """Raise `ConfigError` for an option that can't be used with Ray Serve."""
    given = {word.partition("=")[0].lstrip("+") for word in options.words}
    if taken := sorted(NOT_AVAILABLE & given):
        raise ConfigError(f"{taken[0]}: not available with Ray Serve, which has its own configuration. Leave it out.")
    if any(name.partition(".")[0] == "multi_node" for name in given):
        raise ConfigError(
            "multi_node: with Ray Serve, all GPUs of a replica are on one node: choose tp=N for N GPUs of a node. For "
            "a model on the GPUs of several nodes, start python -m minisgl with torchrun."
        )
    if options.num_gpus not in (0, config.tp):
        raise ConfigError(
            f"num_gpus={options.num_gpus} tp={config.tp}: a replica needs as many GPUs as ranks, or 0 for a CPU. Ray "
            "gives a replica GPUs of one node only."
        )
    if config.device not in ("auto", "cuda" if options.num_gpus else "cpu"):
        raise ConfigError(
            f"device={config.device} num_gpus={options.num_gpus}: the device follows from num_gpus, which is 0 for a "
            f"CPU or {config.tp} (tp) for GPUs."
        )


def engine_words(words: Sequence[str], num_gpus: int) -> list[str]:
    """Return the arguments of a server: those of the application without the router's."""
    dropped = {*ROUTER_GROUPS, *OWN_OPTIONS, "device"}
    kept = [word for word in words if word.partition("=")[0].lstrip("+").partition(".")[0] not in dropped]
    kept = [word for word in kept if not word.lstrip("+").startswith("server.allowed_hosts=")]
    kept.append("server.allowed_hosts=[*]")  # requests have the Host of Ray Serve's address
    return [*kept, f"device={'cuda' if num_gpus else 'cpu'}", "server.host=127.0.0.1", "server.port=0"]


# ---- between the ingress and the engines ---------------------------------------------------------------------


class Call:
    """A request to an engine.

    Only the first four fields are sent to the engine. The others connect the ingress with the router, which runs in
    another thread of its process.
    """

    def __init__(self, method: bytes, target: bytes, headers: Headers, body: bytes):
        self.method, self.target, self.headers, self.body = method, target, headers, body
        self.view: PromptView | None = None
        """What the policy is told. None for a request that generates nothing."""
        self.tried: frozenset[str] = frozenset()
        """The replicas that failed."""
        self.replica = ""
        """The replica that the router chose, once it has. The router writes it, and `others_left` and `on`."""
        self.others_left = False
        """Whether another replica has not been tried."""
        self.on: Callable[[str], None] | None = None
        """Tells the router of an event: ``first_token`` or ``end``."""
        self.ended = False
        """Whether the ingress needs the call no longer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self.method, self.target, self.headers, self.body)

    def tell(self, event: str) -> None:
        """Tell the router of an event. The ingress calls this."""
        self.ended = self.ended or event == "end"
        if self.on is not None:
            self.on(event)

    def count_at(self, replica: str, on: Callable[[str], None]) -> None:
        """Record that the call counts at ``replica``, and no longer at another one. The router calls this."""
        before, self.replica, self.on = self.on, replica, on
        if before is not None:
            before("end")
        if self.ended:  # in the meantime
            on("end")


@dataclass(frozen=True)
class Head:
    """The beginning of an engine's response. Pieces of its body follow, as bytes."""

    status: int
    headers: list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Failure:
    """The end of a response that is not complete. ``sent`` is False if the server has not seen the request."""

    message: str
    sent: bool


# ---- the engine ----------------------------------------------------------------------------------------------


class Health:
    """The health of a server: it is dead if it has ended, or answers no health check for ``timeout`` seconds.

    Bad seconds are added up check by check, so that the time while this process is stopped does not count.
    """

    def __init__(self, process: ReplicaProcess, upstream: Upstream, timeout: float):
        self._process, self._upstream, self._timeout = process, upstream, timeout
        self._bad = 0.0

    async def check(self) -> None:
        """Raise RuntimeError if the server is dead."""
        if self._process.exit_status is not None:
            raise RuntimeError(f"The server {await self._process.wait()}.")
        began = time.monotonic()
        if await is_healthy(self._upstream):
            self._bad = 0.0
            return
        self._bad += min(time.monotonic() - began, UNHEALTHY_SECONDS) + HEALTH_SECONDS
        log.warning("the server does not answer its health check")
        if self._bad >= self._timeout:
            raise RuntimeError(f"The server answered no health check for {self._timeout:g} s (health_timeout).")


class Engine:
    """A replica: one server, which ends when this actor does, however it ends.

    The server's main process ends when its standard input is closed, and its workers end with it.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, words: Sequence[str], num_gpus: int, kv_events: bool
    ):
        config, _ = compose_options(words)
        server = engine_words(words, num_gpus)
        self._endpoints: list[str] = []
        if kv_events:
            host = ray.util.get_node_ip_address()
            address = f"[{host}]" if ":" in host else host
            self._endpoints = [f"tcp://{address}:{free_port(host)}" for _ in range(2)]
            server += [f"kv_events.endpoint={self._endpoints[0]}", f"kv_events.replay_endpoint={self._endpoints[1]}"]
        # CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS are in the environment of this actor: Ray has set them.
        self._process = await ReplicaProcess.start("engine", [*SERVER, *server], {})
        try:
            url = await self._wait_until_ready(config.start_timeout)
            self._upstream = Upstream(*address_of(url))
            info = await self._get("/server_info", config.server.api_key)
        except BaseException:
            await self._process.kill()
            raise
        self._block_size, self._max_seq_len = info["page_size"], info["context_length"]
        self._health = Health(self._process, self._upstream, config.health_timeout)

    async def _wait_until_ready(self, seconds: float) -> str:
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({ended, self._process.ready}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._process.ready.done() and not self._process.ready.cancelled():
            ended.cancel()
            return self._process.ready.result()
        await asyncio.wait({ended}, timeout=END_SECONDS if self._process.ready.done() else 0.0)
        reason = ended.result() if ended.done() else f"did not start within {seconds:g} s (start_timeout)"
        raise RuntimeError("\n".join([f"The server {reason}. Its last lines:", *self._process.log]))

    async def _get(self, path: str, api_key: str | None) -> dict[str, Any]:
        headers = [
            (b"host", b"engine"),
            *([] if api_key is None else [(b"authorization", f"Bearer {api_key}".encode())]),
        ]
        response = await self._upstream.request(b"GET", path.encode(), headers, b"")
        body = await response.body()
        response.close()
        found: dict[str, Any] = msgspec.json.decode(body)
        return found

    async def pass_on(self, call: Call) -> AsyncIterator[Head | bytes | Failure]:
        """Yield the head of the server's response, and its pieces as they arrive.

        If the caller cancels, the connection to the server is closed, which aborts the request.
        """
        try:
            response = await self._upstream.request(call.method, call.target, call.headers, call.body)
        except UpstreamError as error:
            yield Failure(str(error), error.sent)
            return
        try:
            yield Head(response.status, response.headers)
            async for piece in response.pieces():
                yield piece
        except UpstreamError as error:
            yield Failure(str(error), error.sent)
        finally:
            response.close()

    async def sizes(self) -> tuple[int, int]:
        """Return the tokens of a KV page, and the largest length of a request in tokens."""
        return self._block_size, self._max_seq_len

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what routers need to follow the KV events. Ray Serve calls this and tells the routers."""
        return {"endpoints": self._endpoints, "block_size": self._block_size}

    async def check_health(self) -> None:
        """Raise RuntimeError if the server is dead. Ray Serve calls this, and replaces the replica."""
        await self._health.check()

    async def __del__(self) -> None:
        """End the server. Ray Serve calls this once the open requests have ended, before it kills the actor."""
        if not hasattr(self, "_upstream"):  # it did not start
            return
        self._upstream.close()
        self._process.interrupt()
        await asyncio.wait({asyncio.ensure_future(self._process.wait())}, timeout=END_SECONDS)
        await self._process.kill()


# ---- the ingress ---------------------------------------------------------------------------------------------


class HandleResponse:
    """The response to one call of a handle."""

    def __init__(self, head: Head, stream: Any):
        self.status, self.headers = head.status, head.headers
        self._stream = stream
        self._complete = False

    async def pieces(self) -> AsyncIterator[bytes]:
        while (item := await _next(self._stream)) is not None:
            if isinstance(item, bytes):
                yield item
            else:
                self._complete = True
                raise UpstreamError(item.message if isinstance(item, Failure) else "The engine failed.")
        self._complete = True

    def close(self) -> None:
        if not self._complete:
            self._stream.cancel()


class HandleAttempt:
    """One call of the engine's handle, for one attempt of a request."""

    def __init__(self, engine: DeploymentHandle, view: PromptView | None, tried: frozenset[str]):
        self._engine, self._view, self._tried = engine, view, tried
        self._call: Call | None = None

    @property
    def name(self) -> str:
        return self._call.replica if self._call is not None else ""

    @property
    def others_left(self) -> bool:
        return self._call is not None and self._call.others_left

    async def request(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> HandleResponse:
        call = self._call = Call(method, target, headers, body)
        call.view, call.tried = self._view, self._tried
        stream = self._engine.options(stream=True).pass_on.remote(call)
        try:
            head = await _next(stream)
        except BaseException:
            stream.cancel()
            raise
        if isinstance(head, Failure):
            raise UpstreamError(head.message, head.sent)
        if not isinstance(head, Head):
            raise UpstreamError("The engine sent no response.")
        return HandleResponse(head, stream)

    def first_token(self) -> None:
        if self._call is not None:
            self._call.tell("first_token")

    def end(self) -> None:
        if self._call is not None:
            self._call.tell("end")


async def _next(stream: Any) -> Any:
    """Return the next item of a handle's stream, or None at its end. Raise `UpstreamError` if the replica fails."""
    try:
        return await anext(stream, None)
    except (ray.exceptions.RayError, RayServeException) as error:
        raise UpstreamError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


class HandleRelay(Relay):
    """Passes requests on through the handle of the engines. The handle's router chooses the replica."""

    def __init__(self, engine: DeploymentHandle, reader: PromptReader, config: ClusterConfig):
        server = config.server
        super().__init__(reader, server.body_limit(0), server.api_key, server.request_timeout)
        self._engine = engine

    def _begin(self, view: PromptView, generate: bool, before: Sequence[Attempt]) -> HandleAttempt:
        if before and not before[-1].others_left:
            raise ApiError(503, "No replica answers: try again later.", headers={"retry-after": "1"})
        tried = frozenset(attempt.name for attempt in before)
        return HandleAttempt(self._engine, view if generate else None, tried)


class Ingress:
    """Reads requests and passes them on to the engines. Ray Serve's HTTP proxies call it."""

    async def __init__(self, words: Sequence[str], engine: DeploymentHandle):  # type: ignore[misc]
        config, manager = compose_options(words)
        setup_logging(config.log_level, config.log_format, "ingress")
        self._engine = engine
        self._body_limit = config.server.body_limit
        self._reader = PromptReader(
            build_tokenizer(config.tokenizer, manager, resolve_model(config.model), config.parse_special_tokens),
            config.kv_events.hash_seed,
            config.server.api_key,
        )
        self._relay = HandleRelay(engine, self._reader, config)
        self._app = observed(self._relay, Config().server)
        self._starting = asyncio.create_task(self._read_sizes())

    async def __call__(self, request: Request) -> StarletteResponse:
        return _Application(self._app)

    async def _read_sizes(self) -> None:
        """Ask an engine for its sizes. Until it answers, prompts are not read, and requests are routed by load."""
        while True:
            try:
                block_size, max_seq_len = await self._engine.sizes.remote()
                break
            except ray.exceptions.RayError as error:
                log.warning("no engine tells its sizes: %s", error)
                await asyncio.sleep(INFO_POLL_SECONDS)
        self._reader.begin(block_size, max_seq_len)
        self._relay.max_body = self._body_limit(max_seq_len)


class _Application(StarletteResponse):
    """A response that is an ASGI application. It reads the request itself."""

    def __init__(self, app: Any):
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")  # the application's route_prefix, which the engines do not know
        raw = scope["raw_path"].removeprefix(prefix.encode())
        own = {"root_path": "", "path": scope["path"].removeprefix(prefix) or "/", "raw_path": raw or b"/"}

        async def send_once(message: Message) -> None:
            """Leave out the headers that Ray's HTTP proxy adds."""
            if message["type"] == "http.response.start":
                kept = [header for header in message["headers"] if header[0] not in PROXY_HEADERS]
                message = {**message, "headers": kept}
            await send(message)

        await self._app({**scope, **own}, receive, send_once)


# ---- the router ----------------------------------------------------------------------------------------------


@dataclass
class Known:
    """What the router knows of one replica. ``index`` is its position in the policy's list of views."""

    index: int
    view: Replica
    subscriber: KVSubscriber | None = None


@dataclass
class Views:
    """The routers' views of the replicas, by Ray's names of them, and the policy that chooses by the views.

    A new replica takes the position of a dead one, so that the list does not grow.
    """

    policy: RoutingPolicy
    known: dict[str, Known] = field(default_factory=dict)
    views: list[Replica] = field(default_factory=list)

    def update(self, names: Sequence[str]) -> list[Known]:
        """Forget the replicas that are not in ``names``, and add new ones. Return what was forgotten."""
        gone = [self.known.pop(name) for name in list(self.known) if name not in names]
        for each in gone:
            each.view.stop()
        for name in names:
            if name not in self.known:
                self._add(name)
        return gone

    def _add(self, name: str) -> None:
        index = next((i for i, view in enumerate(self.views) if not view.alive), len(self.views))
        view = Replica(1)
        self.views[index : index + 1] = [view]
        self.known[name] = Known(index, view)

    def choose(self, view: PromptView | None, candidates: Sequence[str], tried: frozenset[str]) -> str:
        """Return the name of a replica: one of ``candidates``, and not one of ``tried`` if there is another.

        The policy is not asked for a request that generates nothing: it goes to the replica with the fewest requests.
        """
        allowed = [name for name in candidates if name not in tried] or list(candidates)
        if view is not None:
            try:
                return self._ask(view, allowed)
            except Exception:  # Ray would let the request wait without end
                log.exception("the routing policy failed")
        return min(allowed, key=lambda name: self.known[name].view.requests)

    def _ask(self, view: PromptView, allowed: Sequence[str]) -> str:
        hidden = [each.view for name, each in self.known.items() if name not in allowed and each.view.alive]
        for each in hidden:
            each.alive = False
        try:
            index = self.policy.choose(view.block_hashes, view.prompt_tokens, self.views)
        finally:
            for each in hidden:
                each.alive = True
        return next(name for name, each in self.known.items() if each.index == index)


class PolicyRouter(RequestRouter):  # type: ignore[misc]
    """Chooses the replica of each call by minisgl's routing policy. Ray Serve makes one for each handle.

    All its methods run in one event loop. `Call.on` is called in other threads.
    """

    def initialize_state(self, words: Sequence[str]) -> None:
        """Build the policy of the options ``words``. Ray Serve calls this after the constructor."""
        config, manager = compose_options(words)
        self._views = Views(manager.build("routing", config.routing))
        self._keys = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Begin to follow the KV events of new replicas, and forget those that are gone."""
        super().update_replicas(replicas)
        for gone in self._views.update([replica.replica_id.unique_id for replica in replicas]):
            self._unsubscribe(gone)
        for replica in replicas:
            known, stats = self._views.known[replica.replica_id.unique_id], replica.routing_stats
            if known.subscriber is None and stats.get("endpoints"):
                known.view.block_size = stats["block_size"]
                endpoint, replay_endpoint = stats["endpoints"]
                known.subscriber = KVSubscriber(endpoint, replay_endpoint, known.view.apply)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        names = [name for name in self._views.known if name != replica_id.unique_id]
        for gone in self._views.update(names):
            self._unsubscribe(gone)

    def _unsubscribe(self, gone: Known) -> None:
        if gone.subscriber is not None:
            task = asyncio.get_running_loop().create_task(gone.subscriber.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the policy's choice, and then all others: Ray takes them if the chosen replica is full."""
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        call = _call_of(pending_request)
        if call is None or not set(names) <= self._views.known.keys():
            return [candidate_replicas]
        if call.replica not in names:
            name = self._views.choose(call.view, names, call.tried)
            call.others_left = any(other not in {*call.tried, name} for other in names)
            self._count(call, name)
        first = [replica for replica in candidate_replicas if replica.replica_id.unique_id == call.replica]
        return [first, [replica for replica in candidate_replicas if replica not in first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the call where it was sent, which may be another replica than the chosen one."""
        call, name = _call_of(pending_request), replica_id.unique_id
        if call is not None and call.replica != name and name in self._views.known:
            self._count(call, name)

    def _count(self, call: Call, name: str) -> None:
        """Count the call at a replica until its end."""
        view, key, loop = self._views.known[name].view, next(self._keys), asyncio.get_running_loop()
        prompt = call.view or PromptView()
        view.start(key, prompt.block_hashes, prompt.prompt_tokens, prompt.output_tokens)
        events = {"first_token": view.first_token, "end": view.end}
        call.count_at(name, lambda event: _call_soon(loop, events[event], key))


def _call_of(pending_request: PendingRequest | None) -> Call | None:
    """Return the call that waits to be routed, or None if it is a call of another method."""
    arguments = [] if pending_request is None else pending_request.args
    return next((argument for argument in arguments if isinstance(argument, Call)), None)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[int], None], key: int) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call, key)
