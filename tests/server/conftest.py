"""Fixtures of the server tests. A server is started once per session, when the first test needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import httpx
import msgspec
import openai
import pytest
import zmq

from minisgl.config import Config
from minisgl.core import EngineSpec, Finished
from minisgl.message import Abort, Accepted, Call, Delta, Replies, Submit
from minisgl.message.queue import Addresses, Pull, Push
from minisgl.plugins.http import HttpConfig
from minisgl.server import parsing
from minisgl.server.app import Api, create_app
from minisgl.server.dispatch import Dispatcher
from minisgl.server.extension import HttpExtension, load_extensions
from minisgl.server.request_record import RequestRecord
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.serving import Server

Body = TypeVar("Body", bound=msgspec.Struct)
CHECKS = [extension.check_fields for extension in load_extensions(Config(), names=["bounds", "compatible"])]
"""The checks of parameters that a server makes."""


def parse(body: bytes, kind: type[Body]) -> Body:
    """Parse a body as a server with its extensions does."""
    return parsing.parse(body, kind, CHECKS)


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random Llama with a byte-level tokenizer and 8192 positions."""
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_checkpoint("llama", folder, tokenizer=True, max_position_embeddings=8192)


@pytest.fixture(scope="session")
def tutor() -> Iterator[Server]:
    """Start a server with the embedded model and one tokenizer process."""
    with Server("model=tutor", "num_pages=512") as server:
        yield server


@pytest.fixture(scope="session")
def client(tutor: Server) -> Iterator[openai.OpenAI]:
    with client_of(tutor) as client:
        yield client


def answer(uid: int, value: Any) -> Call:
    """Return the answer to the question ``uid`` of an extension."""
    return Call("minisgl.plugins.http.apis.queries:receive", [uid, value, None])


class AppServer:
    """The ASGI application with its dispatcher, in this process. A task acts as the worker processes.

    It answers a prompt with the tokens 7 and 8 ("a" and "b"), or, with ``silent``, only accepts it. ``submitted`` and
    ``aborted`` are what the workers got.
    """

    SPEC = EngineSpec(page_size=16, num_pages=64, max_running_requests=8, max_seq_len=512, vocab_size=320)

    def __init__(
        self,
        config: Config,
        extensions: Sequence[HttpExtension] = (),
        silent: bool = False,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ):
        extensions = [*load_extensions(config), *extensions]
        self.silent = silent
        self.submitted: list[Submit] = []
        self.aborted: list[int] = []
        self.counts = dict.fromkeys(
            ("num_running_reqs", "num_waiting_reqs", "prompt_tokens", "cached_prompt_tokens", "output_tokens"), 0.0
        )
        self.counts |= {"retractions": 0.0, "num_pages": 64.0, "num_free_pages": 64.0, "num_evictable_pages": 0.0}
        self.observed = ""  # the metrics of the observers
        self._addresses = Addresses.make(1, 1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dispatcher = Dispatcher(self._addresses, 100)
        self._tokenizer = Pull(self._context, self._addresses.tokenizers[0])
        self._scheduler = Pull(self._context, self._addresses.scheduler)
        self._detokenizer = Pull(self._context, self._addresses.detokenizer)
        self._inboxes = (self._tokenizer, self._scheduler, self._detokenizer)
        self._api = Push(self._context, self._addresses.api)
        self.dispatcher.begin(self.SPEC)
        api = Api(config, self.dispatcher, extensions, defaults)
        for extension in extensions:
            extension.begin(api)
        self.app = create_app(api)

    def client(self, **more: Any) -> httpx.AsyncClient:
        """Return a client of the application. ``more`` are arguments of `httpx.AsyncClient`."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://x", **more)

    async def work(self) -> None:
        """Act as the worker processes."""
        while True:
            arrived = [message for inbox in self._inboxes for message in inbox.drain(block=False)]
            for message in arrived:
                if isinstance(message, Submit):
                    self.submitted.append(message)
                    self._api.send(Accepted(message.uids, [3] * len(message.uids)))
                    if not self.silent:
                        self._answer(message.uids)
                elif isinstance(message, Abort):
                    self.aborted += message.uids
                elif isinstance(message, Call):
                    counts = {"count": [self.counts, self.observed], "own_counts": [0, []]}
                    uid, function, _ = message.arguments
                    self._api.send(answer(uid, counts[function.rpartition(":")[2]]))
            await asyncio.sleep(0.002)

    def _answer(self, uids: Sequence[int]) -> None:
        self._api.send(Replies([Delta(uid, "a", [7]) for uid in uids]))
        self._api.send(Replies([Delta(uid, "b", [8], finish=Finished(uid, "length", 3, 0, 2)) for uid in uids]))

    def close(self) -> None:
        self.dispatcher.close()
        self._context.destroy(linger=0)
        self._addresses.remove()


class OnEnd(HttpExtension):
    """Calls a function with the record of every request that has ended."""

    def __init__(self, call: Callable[[RequestRecord], None]):
        self.on_end = call  # type: ignore[method-assign]


AppTest: TypeAlias = Callable[[AppServer], Awaitable[None]]


@pytest.fixture
def run_app() -> Callable[..., None]:
    """Return a function that runs an async test with an `AppServer`, made with the given options of the server."""

    def run(
        test: AppTest,
        *,
        silent: bool = False,
        on_end: Sequence[Callable[[RequestRecord], None]] = (),
        extensions: Sequence[HttpExtension] = (),
        defaults: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        async def body() -> None:
            config = Config(server=HttpConfig(served_model_name="m", **options))
            server = AppServer(config, [*extensions, *map(OnEnd, on_end)], silent, defaults)
            workers = asyncio.create_task(server.work())
            try:
                async with asyncio.timeout(300):
                    await test(server)
            finally:
                workers.cancel()
                server.close()

        asyncio.run(body())

    return run
