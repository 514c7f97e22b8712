"""The router's application where each replica is a server at an address: `Relay` over connections to them.

The routing policy chooses the replica of each request that generates text. Other requests go to the replica with the
fewest open requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from minisgl.cluster.relay import Attempt, PromptReader, PromptView, Relay, path_of
from minisgl.cluster.routing import NoReplicaError, Replica, RoutingPolicy
from minisgl.cluster.status import PATHS, ClusterStatus
from minisgl.cluster.upstream import Response, Upstream
from minisgl.server.errors import ApiError


class ReplicaAttempt:
    """An attempt at one of the proxy's replicas. It counts in the replica's view until `end`."""

    def __init__(self, index: int, replica: Replica, upstream: Upstream, key: int, others_left: bool):
        self.index, self.name, self.others_left = index, f"replica-{index}", others_left
        self._replica, self._upstream, self._key = replica, upstream, key

    async def request(
        self, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> Response:
        return await self._upstream.request(method, target, headers, body)

    def first_token(self) -> None:
        self._replica.first_token(self._key)

    def end(self) -> None:
        self._replica.end(self._key)


class Proxy(Relay):
    """The ASGI application. The lists ``replicas`` and ``upstreams`` have the same order.

    `connect` and `disconnect` change them. For the other arguments, see `Relay`.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        status: ClusterStatus,
        read_prompt: PromptReader,
        max_body: int,
        api_key: str | None = None,
        request_timeout: float | None = None,
    ):
        super().__init__(read_prompt, max_body, api_key, request_timeout)
        self.replicas: list[Replica] = []
        self._upstreams: list[Upstream | None] = []
        self._policy, self._status = policy, status
        self._keys = itertools.count()
        status.update = self._update

    # ---- replicas --------------------------------------------------------------------------------------------

    def connect(self, index: int, host: str, port: int, block_size: int) -> Replica:
        """Send requests to replica ``index`` from now on. Return its view, which is empty."""
        while len(self.replicas) <= index:
            self.replicas.append(Replica(block_size))
            self.replicas[-1].stop()
            self._upstreams.append(None)
        self.replicas[index], self._upstreams[index] = Replica(block_size), Upstream(host, port)
        return self.replicas[index]

    def disconnect(self, index: int) -> None:
        """Send no request to replica ``index`` any more, and break off those that it has."""
        if index < len(self.replicas):
            self.replicas[index].stop()
            upstream, self._upstreams[index] = self._upstreams[index], None
            if upstream is not None:
                upstream.close()

    async def _update(self) -> None:
        self._status.retries = self.retries
        for status, replica in zip(self._status.replicas, self.replicas, strict=False):
            status.open_requests, status.cached_blocks = replica.requests, len(replica.blocks)

    # ---- requests --------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        if path in PATHS and scope["method"] in ("GET", "HEAD"):
            await (await self._status.response(path))(scope, receive, send)
            return
        await super().__call__(scope, receive, send)

    async def _pass_on(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._status.check_ready()
        await super()._pass_on(path, scope, receive, send)

    def _begin(self, view: PromptView, generate: bool, before: Sequence[Attempt]) -> ReplicaAttempt:
        tried = {attempt.index for attempt in before if isinstance(attempt, ReplicaAttempt)}
        index = self._choose(view, generate, tried)
        replica, upstream = self.replicas[index], self._upstreams[index]
        assert upstream is not None
        key = next(self._keys)
        replica.start(key, view.block_hashes, view.prompt_tokens, view.output_tokens)
        self._status.replicas[index].requests += 1
        left = any(each.alive and i not in {*tried, index} for i, each in enumerate(self.replicas))
        return ReplicaAttempt(index, replica, upstream, key, left)

    def _choose(self, view: PromptView, generate: bool, tried: set[int]) -> int:
        """Return the index of a living replica that is not in ``tried``. Raise `ApiError` (503) if there is none.

        A request that generates nothing goes to the replica with the fewest requests, and the policy is not asked.
        """
        hidden = [self.replicas[index] for index in tried if self.replicas[index].alive]
        for replica in hidden:
            replica.alive = False
        try:
            if generate:
                return self._policy.choose(view.block_hashes, view.prompt_tokens, self.replicas)
            alive = [index for index, replica in enumerate(self.replicas) if replica.alive]
            if not alive:
                raise NoReplicaError
            return min(alive, key=lambda index: self.replicas[index].requests)
        except NoReplicaError:
            reason = "No replica answers: try again later." if tried else self._status.no_replica
            raise ApiError(503, self._status.stopping or reason, headers={"retry-after": "1"}) from None
        finally:
            for replica in hidden:
                replica.alive = True
