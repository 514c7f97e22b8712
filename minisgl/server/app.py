"""The HTTP routes of the OpenAI API, and a few of minisgl's own. Each reads its request and asks the dispatcher.

Errors of all kinds (a route that does not exist, a body that is no JSON) come as OpenAI error objects.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass

import fastapi
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minisgl.message import unpack_ids
from minisgl.server.answers import Answer
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import ApiError
from minisgl.server.generate import HUNG_UP, Json, streamed, whole
from minisgl.server.metrics import CountRequests, Metrics
from minisgl.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
    ids_prompt,
    parse,
)
from minisgl.utils.version import __version__

MAX_BODY = 64 * 2**20
"""Bytes that a request's body may have."""


@dataclass(frozen=True)
class Settings:
    """What the routes need of the config."""

    model: str
    api_key: str | None = None


def create_app(dispatcher: Dispatcher, settings: Settings, metrics: Metrics) -> FastAPI:
    """The application; everything it knows is handed to it here."""
    app = FastAPI(title="minisgl", version=__version__, openapi_url=None)
    started = int(time.time())

    def check_key(request: Request) -> None:
        if settings.api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {settings.api_key}".encode()):
            raise ApiError(401, "Incorrect API key provided: send Authorization: Bearer <key>.", code="invalid_api_key")

    guarded = fastapi.APIRouter(dependencies=[fastapi.Depends(check_key)])

    def check_model(name: str | None) -> None:
        if name is not None and name != settings.model:
            raise ApiError(
                404, f"The model {name!r} does not exist here: this server has {settings.model!r}.", "model",
                "model_not_found",
            )  # fmt: skip

    @guarded.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = parse(await _body(request), ChatRequest)
        check_model(asked.model)
        params = asked.params(asked.limit, asked.alternatives)
        answer = Answer(
            chat=True,
            model=settings.model,
            n=asked.n,
            logprobs=asked.logprobs,
            token_ids=asked.return_token_ids,
            include_usage=asked.include_usage,
        )
        stream = dispatcher.submit([asked.chat()], params, fill=asked.limit is None)
        return await (streamed if asked.stream else whole)(request, dispatcher, stream, answer)

    @guarded.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parse(await _body(request), CompletionRequest)
        check_model(asked.model)
        params = asked.params(asked.max_tokens, asked.logprobs)
        answer = Answer(
            chat=False,
            model=settings.model,
            n=asked.n,
            logprobs=asked.logprobs is not None,
            token_ids=asked.return_token_ids,
            include_usage=asked.include_usage,
        )
        stream = dispatcher.submit(asked.prompts(), params, fill=False)
        return await (streamed if asked.stream else whole)(request, dispatcher, stream, answer)

    def model_card() -> dict[str, object]:
        card = {"id": settings.model, "object": "model", "created": started, "owned_by": "minisgl"}
        return {**card, "max_model_len": dispatcher.max_len}

    @guarded.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [model_card()]})

    @guarded.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name)
        return Json(model_card())

    @guarded.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = parse(await _body(request), TokenizeBody)
        check_model(asked.model)
        reply = await dispatcher.count(asked.one(), asked.return_token_strs)
        if reply.error is not None:
            raise ApiError.ended(reply.error)
        tokens = unpack_ids(reply.ids).tolist()
        body = {"count": len(tokens), "max_model_len": dispatcher.max_len, "tokens": tokens}
        return Json({**body, "token_strs": reply.strings} if asked.return_token_strs else body)

    @guarded.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = parse(await _body(request), DetokenizeBody)
        check_model(asked.model)
        reply = await dispatcher.untokenize(ids_prompt(asked.tokens, "tokens").ids)
        if reply.error is not None:
            raise ApiError.ended(reply.error)
        return Json({"prompt": reply.text})

    @app.get("/health")
    async def health() -> Response:
        dispatcher.check_open()
        return Json({"status": "ok"})

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await metrics.text(dispatcher), media_type="text/plain; version=0.0.4")

    app.include_router(guarded)
    _errors(app)
    app.add_middleware(CountRequests, counter=metrics.requests)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return Json(error.body, status_code=error.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        said = {404: f"Unknown request URL: {where}.", 405: f"Not allowed to {where}."}
        message = said.get(error.status_code, str(error.detail))
        return Json(ApiError(error.status_code, message, code="unknown_url").body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return Json(ApiError(500, f"The server failed: {type(error).__name__}.").body, status_code=500)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:
                raise ApiError(413, f"The body is larger than {MAX_BODY >> 20} MiB.", code="request_too_large")
    except ClientDisconnect:
        raise ApiError(HUNG_UP, "The client hung up.") from None
    return bytes(body)
