"""``POST /tokenize`` and ``POST /detokenize``, which a tokenizer process answers. The parameters are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.message import Prompt, TextPrompt, TokensPrompt
from minisgl.plugins.http.apis.parameters import chat_prompt
from minisgl.plugins.http.apis.queries import ask_text, ask_tokens, in_time
from minisgl.plugins.http.apis.token_ids import tokens_prompt
from minisgl.sampling_params import too_long
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return TokenizeRoutes()


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    def to_prompt(self) -> Prompt:
        """Return the prompt to tokenize.

        Raise `ApiError` if not exactly one of prompt and messages is given, or a parameter that belongs to the other.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "Give either prompt or messages.", "prompt")
        if self.messages is not None:
            if self.add_special_tokens:
                message = "add_special_tokens: true is only allowed with prompt: a chat template writes them itself."
                raise ApiError(400, message, "add_special_tokens")
            begins = self.add_generation_prompt is not False
            return chat_prompt(self.messages, begins, self.chat_template_kwargs, self.continue_final_message)
        if self.add_generation_prompt is not None:
            raise ApiError(400, "add_generation_prompt is only allowed with messages.", "add_generation_prompt")
        if self.continue_final_message:
            raise ApiError(400, "continue_final_message is only allowed with messages.", "continue_final_message")
        if self.chat_template_kwargs:
            raise ApiError(400, "chat_template_kwargs is only allowed with messages.", "chat_template_kwargs")
        return TextPrompt(self.prompt or "", self.add_special_tokens is not False)


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class TokenizeRoutes(HttpExtension):
    """The two routes."""

    def add_routes(self, router: APIRouter, api: Api) -> None:
        dispatcher, config = api.dispatcher, api.config.server

        @router.post("/tokenize")
        async def tokenize(request: Request) -> Response:
            body, prompt = await api.read(request, TokenizeBody, TokenizeBody.to_prompt)
            api.check_model(body.model)
            query = ask_tokens(dispatcher, prompt, body.return_token_strs)
            tokens, texts = await in_time(query, config.request_timeout)
            result = {"count": len(tokens), "max_model_len": dispatcher.max_seq_len, "tokens": tokens}
            return Json({**result, "token_strs": texts} if body.return_token_strs else result)

        @router.post("/detokenize")
        async def detokenize(request: Request) -> Response:
            limit = dispatcher.max_seq_len
            body, prompt = await api.read(request, DetokenizeBody, lambda body: check_tokens(body, limit))
            api.check_model(body.model)
            return Json({"prompt": await in_time(ask_text(dispatcher, prompt.ids), config.request_timeout)})


def check_tokens(body: DetokenizeBody, max_seq_len: int) -> TokensPrompt:
    """Return the token ids of a body. Raise `ApiError` for more ids than a request can have, or for a wrong id."""
    if len(body.tokens) > max_seq_len > 0:  # 0: the server is starting
        error = too_long("tokens", max_seq_len, f"There are {len(body.tokens)} token ids.")
        raise ApiError.from_invalid(error)
    return tokens_prompt(body.tokens, "tokens")
