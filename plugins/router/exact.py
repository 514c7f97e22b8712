"""`router=exact`: an HTTP proxy that knows from KV events which blocks each replica has cached.

The router tokenises each prompt as the servers do, computes the hashes of its blocks, and lets the routing policy
(``routing=``) choose a replica by what its cache contains. smg keeps an approximate tree of the texts that it has sent
to each replica instead: it does not see what a replica evicts.

This file reads prompts and follows KV events. `minisgl.cluster.proxy` passes the requests on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.message import Limits, Message, Prompt, TokenizeReply, TokenizeRequest, unpack_ids
from minisgl.message.kv_events import block_hashes, root_hash
from minisgl.message.socket_folder import make_folder, remove_folder
from minisgl.models.resolve import resolve_model

# Every process of every server loads this file, so the HTTP libraries are imported where a router is built.
if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from minisgl.cluster.http_server import HttpServer
    from minisgl.cluster.kv_subscriber import KVSubscriber
    from minisgl.cluster.options import ClusterConfig
    from minisgl.cluster.proxy import PromptView
    from minisgl.cluster.routing import RoutingPolicy
    from minisgl.cluster.status import ClusterStatus

log = logging.getLogger(__name__)

MAX_PENDING = 4 << 20
"""Bytes of bodies that may wait to be tokenised. A request above it is routed by load."""
MAX_PROMPTS = 16
"""The largest number of prompts of one request that the router looks at. They go to one replica."""
READ_SECONDS = 1.0
"""Seconds in which a prompt must be tokenised, with the wait for other prompts. Else the request is routed by load."""
FIRST = ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "first"}]}')
"""A request whose prompt is read before any other: the first one takes longer, for imports and the chat template."""
INFO_SECONDS = 30.0
"""Seconds that a new replica has to answer ``/server_info``."""


@dataclass
class Exact:
    """minisgl's own router. It knows from KV events what each replica has cached. ``routing=`` is its policy."""


class PromptReader:
    """Reads the prompts of requests: their length, and the hashes of the first prompt's blocks.

    Prompts are tokenised in a thread, one after the other, by the code of the servers' tokenizer processes.
    """

    def __init__(self, model: str, parse_special_tokens: bool, hash_seed: int, api_key: str | None):
        from minisgl.server.text_process import TextWorker
        from minisgl.tokenizer.tokenizer import Tokenizer

        self.by_load = 0
        """Requests that could not be read. They are routed by load."""
        self._root = root_hash(hash_seed)
        self._api_key = api_key
        self._replies: list[Message] = []
        self._worker = TextWorker(
            Tokenizer.from_dir(model, parse_special_tokens), self._replies.append, self._replies.append
        )
        self._thread = ThreadPoolExecutor(1, "tokenize")
        self._pending = 0
        self.block_size = 0  # unknown, as long as no replica has been ready
        self._max_seq_len = 0

    def begin(self, block_size: int, max_seq_len: int) -> None:
        """Set the tokens of a block, and the largest length of a request in tokens."""
        self.block_size, self._max_seq_len = block_size, max_seq_len
        self._thread.submit(self._worker.handle, Limits(max_seq_len, 2**31 - 1))
        self._thread.submit(self._read, *FIRST)

    async def __call__(self, path: str, headers: Headers, body: bytes) -> PromptView:
        """Return the view of a request's prompt. A request that the servers will refuse has an empty one.

        The prompt of another client may keep the thread busy, so this waits for `READ_SECONDS` at most. Then the work
        is cancelled unless it has begun.
        """
        from minisgl.cluster.proxy import PromptView, is_authorized
        from minisgl.server.errors import ApiError

        unread = PromptView(prompt_tokens=len(body) // 4)
        if not is_authorized(headers, self._api_key):
            return unread
        if not self.block_size or self._pending + len(body) > MAX_PENDING:
            self.by_load += 1
            return unread
        self._pending += len(body)
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, path, body)
        except ApiError:
            return PromptView(prompt_tokens=1)
        except TimeoutError:
            self.by_load += 1
            return unread
        except Exception:
            log.exception("a prompt can't be read")
            self.by_load += 1
            return unread
        finally:
            self._pending -= len(body)

    def _read(self, path: str, body: bytes) -> PromptView:
        """Return the view of a prompt. Raise `ApiError` if the request is invalid. Called in the thread."""
        from minisgl.cluster.proxy import PromptView
        from minisgl.server.protocol import ChatRequest, CompletionRequest, parse

        if path.endswith("/chat/completions"):
            chat = parse(body, ChatRequest)
            prompts: Sequence[Prompt] = [chat.to_prompt()]
            salt, max_tokens = chat.cache_salt, chat.token_limit
        else:
            completion = parse(body, CompletionRequest)
            prompts = completion.to_prompts()[:MAX_PROMPTS]
            salt, max_tokens = completion.cache_salt, 16 if completion.max_tokens is None else completion.max_tokens
        tokens = [self._tokenize(prompt) for prompt in prompts]
        whole = tokens[0][: len(tokens[0]) // self.block_size * self.block_size]
        salted = b"" if salt is None else salt.encode("utf-8", "surrogatepass")
        length = sum(map(len, tokens))
        left = max(self._max_seq_len - len(tokens[0]), 0)
        return PromptView(
            block_hashes(self._root, whole, self.block_size, salted),
            length,
            left if max_tokens is None else min(max(max_tokens, 0), left),
        )

    def _tokenize(self, prompt: Prompt) -> I32:
        """Return the tokens of a prompt, int32 ``[tokens]``. Raise `ApiError` if the servers will refuse it."""
        from minisgl.server.errors import ApiError

        self._replies.clear()
        self._worker.handle(TokenizeRequest(0, prompt, False))
        [reply] = self._replies
        assert isinstance(reply, TokenizeReply)
        if reply.error is not None:
            raise ApiError.from_finished(reply.error)
        return unpack_ids(reply.ids).astype(np.int32)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class ExactRouter:
    """The router: the proxy, its HTTP server, and a subscriber to the KV events of each replica."""

    def __init__(self, cluster: ClusterConfig, status: ClusterStatus, policy: RoutingPolicy):
        from minisgl.cluster.proxy import Proxy
        from minisgl.server.app import MIN_BODY

        self._cluster, self._status = cluster, status
        self._reader = PromptReader(
            str(resolve_model(cluster.model)),
            cluster.parse_special_tokens,
            cluster.kv_events.hash_seed,
            cluster.server.api_key,
        )
        server = cluster.server
        self._proxy = Proxy(
            policy, status, self._reader, server.max_body or MIN_BODY, server.api_key, server.request_timeout
        )
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
        from minisgl.cluster.http_server import HttpServer
        from minisgl.server.middleware import RequestMiddleware, log_request
        from minisgl.server.serve import listen

        server = self._cluster.server
        listener = listen(server.host, server.port)
        self._http = HttpServer(RequestMiddleware(self._proxy, server.root_path, (log_request,)), listener, server)
        await self._http.start()
        self.status_url = self._http.url
        return self._http.url

    async def add(self, index: int, url: str) -> None:
        from minisgl.cluster.kv_subscriber import KVSubscriber
        from minisgl.cluster.router import address_of
        from minisgl.server.app import BODY_BYTES_PER_TOKEN, MIN_BODY

        info = await self._server_info(url)
        length = info["context_length"]
        self._reader.begin(info["page_size"], length)
        if self._cluster.server.max_body is None:
            self._proxy.max_body = max(MIN_BODY, BODY_BYTES_PER_TOKEN * length)
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


@hookimpl
def minisgl_router(
    config: Any, cluster: ClusterConfig, status: ClusterStatus, policy: RoutingPolicy
) -> ExactRouter | None:
    return ExactRouter(cluster, status, policy) if isinstance(config, Exact) else None
