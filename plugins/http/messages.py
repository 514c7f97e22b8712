"""Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``: chats in other words.

The body becomes a chat (`minisgl.plugins.http.apis.messages_request`), and its answer becomes content blocks
(`minisgl.plugins.http.apis.messages_events`). Errors have Anthropic's form, and the API key may be in ``x-api-key``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.messages_events import MessagesBuilder, error_body
from minisgl.plugins.http.apis.messages_request import CountTokensRequest, MessagesRequest, translate
from minisgl.plugins.http.apis.parameters import FullFormat
from minisgl.plugins.http.apis.queries import ask_tokens, in_time
from minisgl.plugins.http.apis.translation import Translation
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json
from minisgl.server.protocol import Chat
from minisgl.server.request_record import record_of


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return MessagesRoutes()


class MessagesRoute(APIRoute):
    """A route whose errors have Anthropic's form, and whose API key may be in the header ``x-api-key``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_as_anthropic(request: Request) -> Response:
            record = record_of(request.scope)
            key = request.headers.get("x-api-key")
            if key is not None and "authorization" not in request.headers:
                headers = [*request.scope["headers"], (b"authorization", f"Bearer {key}".encode("latin-1"))]
                request = Request({**request.scope, "headers": headers}, request.receive)
            try:
                response = await handle(request)
            except ApiError as error:
                record.error = error.message
                response = Json(error_body(error, record.id), error.status, error.headers)
            response.headers["request-id"] = record.id
            return response

        return handle_as_anthropic


class MessagesRoutes(FullFormat):
    """The two routes."""

    def add_routes(self, router: APIRouter, api: Api) -> None:
        routes = APIRouter(route_class=MessagesRoute)

        def convert(body: CountTokensRequest) -> tuple[Translation, Chat]:
            translation = translate(body)
            return translation, translation.read(api)

        @routes.post("/v1/messages")
        async def messages(request: Request) -> Response:
            body, (translation, chat) = await api.read(request, MessagesRequest, convert)
            api.check_model(body.model)
            builder = MessagesBuilder(api.model, record_of(request.scope).id, body.max_tokens, translation.rename)
            builder.form = chat.form
            try:
                params = chat.body.params(body.max_tokens, api.sampling_defaults)
                return await api.generate(
                    request,
                    [chat.prompt],
                    chat.form.params(params),
                    builder,
                    stream_output=body.stream,
                    max_tokens_from_context=True,  # max_tokens is only the most that the client wants
                )
            except ApiError as error:
                raise translation.rename(error) from None

        @routes.post("/v1/messages/count_tokens")
        async def count_tokens(request: Request) -> Response:
            body, (translation, chat) = await api.read(request, CountTokensRequest, convert)
            api.check_model(body.model)
            try:
                query = ask_tokens(api.dispatcher, chat.prompt)
                ids, _ = await in_time(query, api.config.server.request_timeout)
            except ApiError as error:
                raise translation.rename(error) from None
            return Json({"input_tokens": len(ids)})

        router.include_router(routes)
