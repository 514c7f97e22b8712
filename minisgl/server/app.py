"""The HTTP routes: those of the OpenAI API, ``/tokenize``, ``/detokenize``, ``/health``, ``/ready``, ``/metrics``.

Each route parses its request and passes it to the dispatcher. `minisgl.server.server_info` makes the answers that
routers ask for: ``/server_info``, ``/model_info``, ``/get_load`` and ``/v1/loads``. Every error response is an OpenAI
error object, also for an unknown route or a body that is not JSON.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import fastapi
import msgspec
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from minisgl.core import SamplingParams, shorten
from minisgl.message import Prompt, unpack_ids
from minisgl.server.access import BrowserCheck, is_authorized
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import ApiError
from minisgl.server.generate import CLIENT_CLOSED_REQUEST, Json, respond_json, respond_stream
from minisgl.server.metrics import Metrics
from minisgl.server.middleware import RequestMiddleware, log_request
from minisgl.server.protocol import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
    check_work,
    parse,
    tokens_prompt,
)
from minisgl.server.request_record import Generation, RequestRecord, record_of
from minisgl.server.responses import ResponseBuilder
from minisgl.server.server_info import ServerInfo, loads, model_info, request_loads, server_info
from minisgl.utils.version import __version__

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
MIN_BODY = 2**20
"""The smallest default of ``server.max_body``, in bytes."""
BODY_BYTES_PER_TOKEN = 64
"""The bytes of a body that the default of ``server.max_body`` allows for each token of the context."""
SMALL_BODY = 2**16
"""The largest size of a body, in bytes, that is parsed in the event loop's thread."""

_MEDIA = "unsupported_media_type"
GET_OR_HEAD = ["GET", "HEAD"]


@dataclass(frozen=True)
class Settings:
    """The options that the routes need.

    They are the model's name in the API, the API key or None, the largest size of a body in bytes or None for the
    default, which depends on the model's context, the longest time of a request in seconds or None, the prefix of all
    paths, the origins whose pages may use the server, the allowed names in the header ``Host`` or None if it is not
    checked, and the facts for ``/server_info`` and ``/model_info``.
    """

    model: str
    api_key: str | None = None
    max_body: int | None = None
    request_timeout: float | None = None
    root_path: str = ""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    info: ServerInfo = field(default_factory=ServerInfo)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's values of sampling parameters that a request leaves out, by name."""
        return self.info.sampling_defaults

    def body_limit(self, max_seq_len: int) -> int:
        """Return the largest size of a body in bytes, for a server that allows ``max_seq_len`` tokens a request."""
        return self.max_body or max(MIN_BODY, BODY_BYTES_PER_TOKEN * max_seq_len)


def create_app(
    dispatcher: Dispatcher,
    settings: Settings,
    metrics: Metrics,
    on_end: Sequence[Callable[[RequestRecord], None]] = (),
) -> ASGIApp:
    """Build the ASGI application of the API server. It has no global state: all it uses are these arguments.

    Each function of ``on_end`` is called with the record of every request whose response has ended.
    """
    app: ASGIApp = _routes(dispatcher, settings, metrics)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id",),
        )
    if settings.api_key is None:
        app = BrowserCheck(app, settings.cors_origins, settings.allowed_hosts)
    return RequestMiddleware(app, settings.root_path, (metrics.count_request, log_request, *on_end))


def _routes(dispatcher: Dispatcher, settings: Settings, metrics: Metrics) -> FastAPI:
    app = FastAPI(title="minisgl", version=__version__, openapi_url=None)
    started = int(time.time())
    timeout = settings.request_timeout
    default_limit: int | None = settings.sampling_defaults.get("max_tokens")
    too_long = f"The request took longer than {timeout or 0:g} s (server.request_timeout)."

    def check_key(request: Request) -> None:
        if not is_authorized(request.headers.get("authorization", ""), settings.api_key):
            raise ApiError(401, "Incorrect API key provided: send Authorization: Bearer <key>.", code="invalid_api_key")

    guarded = fastapi.APIRouter(dependencies=[fastapi.Depends(check_key)])

    def check_model(name: str | None) -> None:
        if name is not None and name != settings.model:
            raise ApiError(
                404, f"The model {shorten(repr(name))} does not exist here: this server has {settings.model!r}.",
                "model", "model_not_found",
            )  # fmt: skip

    async def read(request: Request, kind: type[S], convert: Callable[[S], T]) -> tuple[S, T]:
        """Read the body of ``request`` as a struct of type ``kind``. Return it, and what ``convert`` makes of it."""
        check_body_headers(request.headers)
        body = await read_body(request, settings.body_limit(dispatcher.max_seq_len))

        def check_and_convert(parsed: S) -> T:
            check_work(parsed, dispatcher.max_seq_len or None)
            return convert(parsed)

        return await parse_body(body, kind, check_and_convert)

    async def generate(
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        builder: ResponseBuilder,
        *,
        stream_output: bool,
        max_tokens_from_context: bool = False,
    ) -> Response:
        """Submit the prompts, and return the response. The request ends with an error after ``timeout``."""
        record = record_of(request.scope)
        stream = dispatcher.submit(prompts, params, max_tokens_from_context, record.id, record.client)
        record.generation = Generation(
            chat=builder.chat,
            response_id=builder.id,
            params=params,
            uids=stream.uids,
            arrival=record.arrival,
            metrics=metrics.generations,
        )
        stream.listener = record.generation.add
        if timeout is not None:
            expire = asyncio.get_running_loop().call_later
            record.generation.timer = expire(timeout - record.seconds, dispatcher.expire, stream, too_long)
        return await (respond_stream if stream_output else respond_json)(request, dispatcher, stream, builder)

    async def query(reply: Awaitable[T]) -> T:
        """Wait for the reply of a tokenizer. Raise `ApiError` (504) after ``timeout``."""
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError:
            raise ApiError(504, too_long) from None

    @guarded.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, prompt = await read(request, ChatRequest, ChatRequest.to_prompt)
        check_model(body.model)
        limit = body.token_limit
        if limit is None:
            limit = default_limit or max(dispatcher.max_seq_len, 1)
        params = body.params(limit, body.num_logprobs, settings.sampling_defaults)
        builder = ResponseBuilder(
            chat=True,
            model=settings.model,
            n=body.n,
            logprobs=body.logprobs,
            token_ids=body.return_token_ids,
            include_usage=body.include_usage,
            prompt_logprobs=body.prompt_logprobs is not None,
            request_id=record_of(request.scope).id,
        )
        return await generate(
            request,
            [prompt],
            params,
            builder,
            stream_output=body.stream,
            max_tokens_from_context=body.token_limit is None,
        )

    @guarded.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, prompts = await read(request, CompletionRequest, CompletionRequest.to_prompts)
        check_model(body.model)
        limit = body.max_tokens
        if limit is None:
            limit = min(DEFAULT_MAX_TOKENS, default_limit or DEFAULT_MAX_TOKENS)
        params = body.params(limit, body.logprobs, settings.sampling_defaults)
        builder = ResponseBuilder(
            chat=False,
            model=settings.model,
            n=body.n,
            logprobs=body.logprobs is not None,
            token_ids=body.return_token_ids,
            include_usage=body.include_usage,
            prompt_logprobs=body.prompt_logprobs is not None,
            request_id=record_of(request.scope).id,
        )
        return await generate(
            request,
            prompts,
            params,
            builder,
            stream_output=body.stream,
        )

    def model_card() -> dict[str, object]:
        if dispatcher.spec is None:  # clients take a model card as the sign that the server is ready
            raise ApiError(503, dispatcher.reason)
        card = {"id": settings.model, "object": "model", "created": started, "owned_by": "minisgl"}
        return {**card, "max_model_len": dispatcher.max_seq_len}

    @guarded.api_route("/v1/models", methods=GET_OR_HEAD)
    async def models() -> Response:
        return Json({"object": "list", "data": [model_card()]})

    @guarded.api_route("/v1/models/{name:path}", methods=GET_OR_HEAD)
    async def model(name: str) -> Response:
        check_model(name)
        return Json(model_card())

    @guarded.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body, prompt = await read(request, TokenizeBody, TokenizeBody.to_prompt)
        check_model(body.model)
        reply = await query(dispatcher.tokenize(prompt, body.return_token_strs))
        if reply.error is not None:
            raise ApiError.from_finished(reply.error)
        tokens = unpack_ids(reply.ids).tolist()
        result = {"count": len(tokens), "max_model_len": dispatcher.max_seq_len, "tokens": tokens}
        return Json({**result, "token_strs": reply.token_strs} if body.return_token_strs else result)

    @guarded.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body, prompt = await read(request, DetokenizeBody, lambda body: tokens_prompt(body.tokens, "tokens"))
        check_model(body.model)
        reply = await query(dispatcher.detokenize(prompt.ids))
        if reply.error is not None:
            raise ApiError.from_finished(reply.error)
        return Json({"prompt": reply.text})

    @guarded.api_route("/server_info", methods=GET_OR_HEAD)
    async def read_server_info() -> Response:
        dispatcher.check_open()
        assert dispatcher.spec is not None
        return Json(server_info(settings.info, settings.model, dispatcher.spec))

    @guarded.api_route("/model_info", methods=GET_OR_HEAD)
    async def read_model_info() -> Response:
        return Json(model_info(settings.info))

    @guarded.api_route("/get_load", methods=GET_OR_HEAD)
    async def read_request_loads() -> Response:
        stats = await dispatcher.stats()
        assert dispatcher.spec is not None
        return Json(request_loads(dispatcher.spec, stats))

    @guarded.api_route("/v1/loads", methods=GET_OR_HEAD)
    async def read_loads() -> Response:
        stats = await dispatcher.stats()
        assert dispatcher.spec is not None
        return Json(loads(dispatcher.spec, stats))

    @app.api_route("/health", methods=GET_OR_HEAD)
    async def health() -> Response:
        dispatcher.check_healthy()
        return Json({"status": "ok"})

    @app.api_route("/ready", methods=GET_OR_HEAD)
    async def ready() -> Response:
        dispatcher.check_healthy()
        dispatcher.check_open(1)
        return Json({"status": "ready"})

    @app.api_route("/metrics", methods=GET_OR_HEAD)
    async def read_metrics() -> Response:
        return Response(await metrics.text(dispatcher), media_type="text/plain; version=0.0.4")

    app.include_router(guarded)
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        record_of(request.scope).error = error.message
        return Json(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        url = shorten(f"{request.method} {request.url.path}")
        messages = {404: f"Unknown request URL: {url}.", 405: f"Method not allowed: {url}."}
        message = messages.get(error.status_code, str(error.detail))
        record_of(request.scope).error = message
        return Json(ApiError(error.status_code, message, code="unknown_url").body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return Json(ApiError(500, f"The server failed: {type(error).__name__}.").body, status_code=500)


def check_body_headers(headers: Headers) -> None:
    """Raise `ApiError` unless the headers of a request describe a JSON body that is not compressed.

    A request without ``Content-Type`` is taken for JSON.
    """
    kind, _, parameters = headers.get("content-type", "application/json").lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]*)", parameters)
    if kind.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8", "us-ascii")):
        given = shorten(repr(headers["content-type"]))
        message = f"The Content-Type is {given}, but the body must be JSON in UTF-8. Send the header Content-Type: "
        raise ApiError(415, f"{message}application/json (curl: -H 'Content-Type: application/json').", code=_MEDIA)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"The Content-Encoding {shorten(repr(encoding))} is not supported: send the body uncompressed."
        raise ApiError(415, message, code=_MEDIA, headers={"accept-encoding": "identity"})
    coding = headers.get("transfer-encoding", "chunked").strip().lower()
    if coding != "chunked":
        message = f"The Transfer-Encoding {shorten(repr(coding))} is not supported, only 'chunked'."
        raise ApiError(501, message)


async def read_body(request: Request, limit: int, on_part: Callable[[int], None] | None = None) -> bytes:
    """Return a request's body. Raise `ApiError` (413) if it is larger than ``limit`` bytes, before it is all read.

    ``on_part(size)`` is called with the bytes of each part that arrives. It may raise `ApiError`.
    """
    too_large = ApiError(413, f"The body is larger than {limit} bytes (server.max_body).", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise too_large
            if on_part is not None:
                on_part(len(part))
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED_REQUEST, "The client disconnected.") from None
    return bytes(body)


async def parse_body(body: bytes, kind: type[S], convert: Callable[[S], T]) -> tuple[S, T]:
    """Parse a body as a struct of type ``kind``. Return it, and what ``convert`` makes of it. Raise `ApiError`.

    A body larger than `SMALL_BODY` is parsed in another thread, so that the event loop can serve other requests.
    """

    def work() -> tuple[S, T]:
        parsed = parse(body, kind)
        return parsed, convert(parsed)

    return work() if len(body) <= SMALL_BODY else await asyncio.to_thread(work)
