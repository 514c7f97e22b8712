"""The HTTP routes: chats of the OpenAI API, and ``/health``.

A chat in one look: `Api.read` parses its body, `Api.generate` submits it to the dispatcher and streams the replies.
Extensions (`minisgl.server.extension`) add other routes with the same methods. Every error response is an OpenAI error
object, also for an unknown route or a body that is not JSON.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import fastapi
import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.config import Config
from minisgl.message import Prompt
from minisgl.sampling_params import SamplingParams, shorten
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from minisgl.server.extension import HttpExtension, overridden
from minisgl.server.generate import Json, ResponseBuilder, respond_json, respond_stream
from minisgl.server.parsing import parse
from minisgl.server.protocol import Chat, ChatRequest, GenerateRequest
from minisgl.server.request_record import Stream, record_of
from minisgl.utils.version import __version__

if TYPE_CHECKING:
    from minisgl.server.launcher import Launcher

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
SMALL_BODY = 2**16
"""The largest size of a body, in bytes, that is parsed in the event loop's thread."""

GET_OR_HEAD = ["GET", "HEAD"]


class Api:
    """What the routes have in common: they read bodies, submit requests and answer through this object.

    ``sampling_defaults`` are the model's values of sampling parameters that a request leaves out, by name. ``launcher``
    is None if the server runs without one.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        extensions: Sequence[HttpExtension] = (),
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        launcher: Launcher | None = None,
    ):
        self.config, self.dispatcher, self.extensions, self.launcher = config, dispatcher, extensions, launcher
        self.model = config.server.served_model_name or config.model
        self.sampling_defaults = sampling_defaults
        self._check_headers = overridden(extensions, "check_headers")
        self.check_fields = overridden(extensions, "check_fields")
        self.check_body, self._forms = overridden(extensions, "check_body"), overridden(extensions, "answer_form")
        formats = [found for extension in extensions if (found := extension.chat_format()) is not None]
        self.chat_request: type[Any]
        self.chat_builder: type[ResponseBuilder]
        self.chat_request, self.chat_builder = formats[0] if formats else (ChatRequest, ResponseBuilder)
        self._check_health = overridden(extensions, "check_health")
        self._admit, self._watch = overridden(extensions, "admit"), overridden(extensions, "watch")

    # ---- what a request asks for -----------------------------------------------------------------------------

    async def read(self, request: Request, kind: type[S], convert: Callable[[S], T]) -> tuple[S, T]:
        """Read the body of ``request`` as a struct of type ``kind``. Return it, and what ``convert`` makes of it.

        Raise `ApiError` for a wrong body. A large body is parsed in another thread.
        """
        for check_headers in self._check_headers:
            check_headers(request.headers)
        max_seq_len = self.dispatcher.max_seq_len
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ApiError(CLIENT_CLOSED_REQUEST, "The client disconnected.") from None

        def check_and_convert(parsed: S) -> T:
            if max_seq_len:  # else the server is starting: it refuses the request anyway
                for check in self.check_body:
                    check(parsed, max_seq_len)
            return convert(parsed)

        return await parse_body(body, kind, check_and_convert, self.check_fields)

    def prepare_chat(self, body: Any) -> Chat:
        """Return a chat that was read, with its prompt and the form of its answer. Raise `ApiError`."""
        answers = (make(body) for make in self._forms)
        form = next((answer for answer in answers if answer is not None), None) or body.form()
        return Chat(body, form.prompt(body.to_prompt()), form)

    def builder_options(self, request: Request, body: GenerateRequest) -> dict[str, Any]:
        """Return the arguments of `ResponseBuilder` for a body."""
        return {"model": self.model, "request_id": record_of(request.scope).id, **body.builder_options()}

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` (404) for the name of another model than the server's."""
        if name is not None and name != self.model:
            raise ApiError(
                404, f"The model {shorten(repr(name))} does not exist here: this server has {self.model!r}.",
                "model", "model_not_found",
            )  # fmt: skip

    def check_healthy(self) -> None:
        """Raise `ApiError` (503) unless the server can generate, and no extension finds it unhealthy."""
        self.dispatcher.check_open()
        for check in self._check_health:
            check()

    def check_key(self, request: Request) -> None:
        """Raise `ApiError` (401) unless the request has the API key, or the server has none."""
        if not is_authorized(request.headers.get("authorization", ""), self.config.server.api_key):
            raise ApiError(401, "Incorrect API key provided: send Authorization: Bearer <key>.", code="invalid_api_key")

    # ---- requests to the workers -----------------------------------------------------------------------------

    async def chat(self, request: Request, chat: Chat, builder: ResponseBuilder) -> Response:
        """Submit a chat, and return the response, which ``builder`` formats. Raise `ApiError` for a refusal."""
        body, limit = chat.body, chat.body.token_limit
        default_limit: int | None = self.sampling_defaults.get("max_tokens")
        most = default_limit or max(self.dispatcher.max_seq_len, 1)
        params = body.params(most if limit is None else limit, self.sampling_defaults)
        builder.form = chat.form
        return await self.generate(
            request, [chat.prompt], chat.form.params(params), builder, stream_output=body.stream,
            max_tokens_from_context=limit is None,
        )  # fmt: skip

    async def generate(
        self,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        builder: ResponseBuilder,
        *,
        stream_output: bool,
        max_tokens_from_context: bool = False,
    ) -> Response:
        """Submit the prompts, and return the response, which ``builder`` formats. Raise `ApiError` for a refusal."""
        stream = self.submit(request, prompts, params, builder, max_tokens_from_context=max_tokens_from_context)
        return await (respond_stream if stream_output else respond_json)(request, self.dispatcher, stream, builder)

    def submit(
        self,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        builder: ResponseBuilder,
        *,
        max_tokens_from_context: bool = False,
    ) -> Stream:
        """Submit the prompts, and return the stream of their replies. Raise `ApiError` for a refusal."""
        record = record_of(request.scope)
        for admit in self._admit:
            admit(prompts, params, record)
        stream = self.dispatcher.submit(prompts, params, max_tokens_from_context, record.id, record.client)
        record.stream, stream.arrival = stream, record.arrival
        builder.stream = stream
        stream.chat, stream.response_id = builder.chat, builder.id
        stream.listeners = [listener for watch in self._watch if (listener := watch(stream)) is not None]
        return stream


def create_app(api: Api) -> ASGIApp:
    """Build the ASGI application of the API server. It has no global state: all it uses is ``api``."""
    routes = FastAPI(title="minisgl", version=__version__, openapi_url=None)
    guarded = fastapi.APIRouter(dependencies=[fastapi.Depends(api.check_key)])
    _add_chat(guarded, api)
    probes = fastapi.APIRouter()
    _add_health(probes, api)
    for extension in api.extensions:
        extension.add_routes(guarded, api)
        extension.add_probes(probes, api)
    routes.include_router(guarded)
    routes.include_router(probes)
    _add_error_handlers(routes)
    return wrapped(routes, api.extensions)


def wrapped(app: ASGIApp, extensions: Sequence[HttpExtension]) -> ASGIApp:
    """Return ``app`` with all extensions around it, which then observe the end of each request."""
    for extension in sorted(extensions, key=lambda extension: extension.is_outermost):
        app = extension.wrap(app)
    on_end = overridden(extensions, "on_end")

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            for call in on_end if scope["type"] == "http" else ():
                call(record_of(scope))

    return observed


def _add_chat(router: fastapi.APIRouter, api: Api) -> None:
    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, chat = await api.read(request, api.chat_request, api.prepare_chat)
        api.check_model(body.model)
        return await api.chat(request, chat, api.chat_builder(**api.builder_options(request, body)))


def _add_health(router: fastapi.APIRouter, api: Api) -> None:
    @router.api_route("/health", methods=GET_OR_HEAD)
    async def health() -> Response:
        api.check_healthy()
        return Json({"status": "ok"})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        record_of(request.scope).error = error.message
        return Json(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        url = shorten(f"{request.method} {request.url.path}")
        message, code = str(error.detail), None
        if error.status_code == 404:
            message, code = f"Unknown request URL: {url}.", "unknown_url"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message, code = f"Method not allowed: {url}. This URL has: {allowed}.", "method_not_allowed"
        record_of(request.scope).error = message
        return Json(ApiError(error.status_code, message, code=code).body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return Json(ApiError(500, f"The server failed: {type(error).__name__}.").body, status_code=500)


def is_authorized(given: str, api_key: str | None) -> bool:
    """Return whether a header ``Authorization`` has the API key. Each has if ``api_key`` is None.

    The name of its scheme, ``Bearer``, may have capital and small letters (RFC 9110, section 11.1).
    """
    scheme, _, key = given.partition(" ")
    if api_key is None:
        return True
    return scheme.lower() == "bearer" and hmac.compare_digest(key.strip(" ").encode("latin-1"), api_key.encode())


async def parse_body(
    body: bytes,
    kind: type[S],
    convert: Callable[[S], T],
    checks: Sequence[Callable[[type, dict[str, msgspec.Raw]], None]] = (),
) -> tuple[S, T]:
    """Parse a body as a struct of type ``kind``. Return it, and what ``convert`` makes of it. Raise `ApiError`.

    A body larger than `SMALL_BODY` is parsed in another thread, so that the event loop can serve other requests.
    """

    def work() -> tuple[S, T]:
        parsed = parse(body, kind, checks)
        return parsed, convert(parsed)

    return work() if len(body) <= SMALL_BODY else await asyncio.to_thread(work)
