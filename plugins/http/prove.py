"""``POST /prove``: answers a chat several times, with different work for the engine, and compares the bits.

The body is that of ``/v1/chat/completions``. The chat is answered

- ``as_sent``: as any other chat, beside the requests that run;
- ``cold``: with nothing of its prompt in the prefix cache;
- ``warm``: with all of its prompt in the cache;
- ``halves``: with the first half of its prompt in the cache, which was computed alone.

The answer has the SHA-256 of the tokens and log-probabilities of each. With ``exact=true`` they are equal
(docs/exact.md); otherwise they may differ by rounding.
"""

from __future__ import annotations

import hashlib
import struct
import time
import uuid
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.core import Finished, SamplingParams
from minisgl.message import Prompt, TokensPrompt, pack_ids
from minisgl.plugins.http.apis.full_answer import FullBuilder, FullChoice, full_choice
from minisgl.plugins.http.apis.parameters import FullChatRequest, FullFormat
from minisgl.plugins.http.apis.queries import ask_tokens, in_time
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json, respond_json
from minisgl.server.protocol import Chat


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return ProveRoute()


class ProveRoute(FullFormat):
    """The route."""

    def add_routes(self, router: APIRouter, api: Api) -> None:
        @router.post("/prove")
        async def prove(request: Request) -> Response:
            body, chat = await api.read(request, FullChatRequest, api.prepare_chat)
            api.check_model(body.model)
            return await Proof(api, request, chat).run()


class Proof:
    """The answers to one chat. Raises `ApiError` for a chat whose tokens are not determined by its parameters."""

    def __init__(self, api: Api, request: Request, chat: Chat):
        body = chat.body
        for name, wrong in {
            "stream": body.stream,
            "n": body.n != 1,
            "cache_salt": body.cache_salt is not None,
            "prompt_logprobs": body.prompt_logprobs is not None,  # then no prefix is taken from the cache
        }.items():
            if wrong:
                raise ApiError(400, f"{name} is not available in /prove.", name)
        limit = body.token_limit
        if limit is None:
            raise ApiError(400, "/prove needs max_completion_tokens.", "max_completion_tokens")
        self._api, self._request, self._prompt = api, request, chat.prompt
        params = body.params(limit, api.sampling_defaults)
        self._params = chat.form.params(msgspec.structs.replace(params, logprobs=params.logprobs or 0))
        if not self._params.greedy and self._params.seed is None:
            raise ApiError(400, "/prove needs temperature: 0 or a seed: other answers differ by chance.", "seed")

    async def run(self) -> Response:
        """Answer the chat in all ways, one after another. Return 499 if the client disconnects."""
        query = ask_tokens(self._api.dispatcher, self._prompt)
        ids, _ = await in_time(query, self._api.config.server.request_timeout)
        first, salt, other = ids[: max(1, len(ids) // 2)], uuid.uuid4().hex, uuid.uuid4().hex
        plain, cold, halves = (msgspec.structs.replace(self._params, cache_salt=key) for key in (None, salt, other))
        only_prompt = SamplingParams(max_tokens=1, temperature=0.0, cache_salt=other, priority=self._params.priority)
        answers: dict[str, dict[str, Any]] = {}
        for name, prompt, params in (
            ("as_sent", ids, plain),
            ("cold", ids, cold),
            ("warm", ids, cold),
            ("", first, only_prompt),
            ("halves", ids, halves),
        ):
            collected = Collected()
            response = await self._answer(TokensPrompt(pack_ids(prompt)), params, collected)
            if not collected.choices:  # the client has disconnected
                return response
            if name:
                answers[name] = collected.summary()
        return Json({"equal": len({answer["sha256"] for answer in answers.values()}) == 1, "answers": answers})

    async def _answer(self, prompt: Prompt, params: SamplingParams, collected: Collected) -> Response:
        api, request = self._api, self._request
        stream = api.submit(request, [prompt], params, collected)
        stream.arrival = time.monotonic()  # for the times of this answer in the metrics
        return await respond_json(request, api.dispatcher, stream, collected)


class Collected(FullBuilder):
    """Keeps the choices instead of formatting them."""

    def __init__(self) -> None:
        super().__init__(model="", logprobs=True, token_ids=True)
        self.choices: list[FullChoice] = []

    def full(self, choices: Any) -> dict[str, Any]:
        """Keep the choices."""
        self.choices = list(map(full_choice, choices))
        return {}

    def summary(self) -> dict[str, Any]:
        """Return the hash of the answer's tokens and log-probabilities, and the counts of tokens."""
        (choice,) = self.choices
        digest = hashlib.sha256()
        for token in choice.tokens:
            digest.update(struct.pack("<i", token))
        for entry in choice.logprobs:
            digest.update(struct.pack("<f", entry.logprob))
            for alternative in entry.top:
                digest.update(alternative.raw + struct.pack("<f", alternative.logprob))
        end = choice.finish
        assert isinstance(end, Finished)
        return {
            "sha256": digest.hexdigest(),
            "completion_tokens": end.output_tokens,
            "cached_tokens": end.cached_tokens,
            "finish_reason": choice.finish_reason,
        }
