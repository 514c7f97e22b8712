"""``POST /v1/completions`` of the OpenAI API: prompts that are no chats, and ``echo``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.completion import (
    DEFAULT_MAX_TOKENS,
    CompletionBuilder,
    CompletionRequest,
    EchoBuilder,
    echo_params,
    read_prompts,
)
from minisgl.server.app import Api
from minisgl.server.extension import HttpExtension


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Completions()


class Completions(HttpExtension):
    """The route."""

    def add_routes(self, router: APIRouter, api: Api) -> None:
        default_limit: int | None = api.sampling_defaults.get("max_tokens")

        @router.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body, prompts = await api.read(request, CompletionRequest, CompletionRequest.to_prompts)
            api.check_model(body.model)
            limit = body.max_tokens
            if limit is None:
                limit = min(DEFAULT_MAX_TOKENS, default_limit or DEFAULT_MAX_TOKENS)
            make: Callable[..., CompletionBuilder] = CompletionBuilder
            if body.echo:
                params = echo_params(body, limit, api.sampling_defaults)
                echoed = await read_prompts(api.dispatcher, prompts, api.config.server.request_timeout)
                make = partial(EchoBuilder, echoed, limit == 0)
            else:
                params = body.params(limit, api.sampling_defaults)
            builder = make(**api.builder_options(request, body))
            return await api.generate(request, prompts, params, builder, stream_output=body.stream)
