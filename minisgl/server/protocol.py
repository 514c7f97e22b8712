"""The request bodies of the HTTP API, as structs. `minisgl.server.parsing` reads them.

This module knows the types and ranges of the parameters, and nothing about models. A parameter that is a field of a
struct here is supported; an extension may read chats with more parameters (`HttpExtension.chat_format`). Any other
parameter is refused with an error that names it, unless an extension removes it (`minisgl.plugins.http.compatible`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from minisgl.message import ChatPrompt
from minisgl.sampling_params import InvalidRequestError, SamplingParams
from minisgl.server.errors import ApiError
from minisgl.server.parsing import convert
from minisgl.utils.json_file import is_neutral

DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters whose default a model's generation_config.json may set, besides the limit of the output."""


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The parameters that every generation has.

    Their names and meanings are those of the OpenAI API, or else of vLLM. A sampling parameter that is None takes the
    server's default.
    """

    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    ignore_eos: bool = False

    @property
    def token_limit(self) -> int | None:
        """The largest number of tokens of the output. None: the client set no limit. Raise `ApiError`."""
        return self.max_tokens

    def params(self, max_tokens: int, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the request's sampling parameters. Raise `ApiError` if a value is out of its range.

        ``max_tokens`` is the limit of the output. ``defaults`` are the values of the parameters that the request
        leaves out, by name.
        """
        given = {name: getattr(self, name) for name in DEFAULT_FIELDS}
        sampling = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        params = SamplingParams(
            **{name: sampling[name] for name in DEFAULT_FIELDS if name in sampling},
            max_tokens=max_tokens,
            n=self.n,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            **self.more_params(),
        )
        try:
            params.check()
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from None
        return params

    def more_params(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that a subclass has parameters for. Raise `ApiError`."""
        return {}

    def builder_options(self) -> dict[str, Any]:
        """Return the arguments of `ResponseBuilder` that the parameters determine."""
        return {"n": self.n}


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One chat message. A field besides role and content is refused unless the chat template uses it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ChatRequest(GenerateRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``. Without ``max_tokens``, the output may fill the context."""

    messages: list[dict[str, Any]]

    def to_prompt(self) -> ChatPrompt:
        """Return the messages as a prompt. Raise `ApiError`."""
        return ChatPrompt(template_messages(self.messages))

    def form(self) -> AnswerForm:
        """Return the form of the answer if no extension has one. Raise `ApiError` for a chat that needs one."""
        return AnswerForm()


class AnswerForm:
    """How the answer to one chat is asked for. This form asks for nothing.

    An extension of the API server chooses the form of each chat (`HttpExtension.answer_form`).
    """

    def prompt(self, prompt: ChatPrompt) -> ChatPrompt:
        """Return the chat's prompt, such as one with tools."""
        return prompt

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the chat's parameters, such as some with a grammar. Raise `ApiError` for those that don't fit."""
        return params


class Chat(NamedTuple):
    """A chat that was read and checked: its request, its prompt with all that the form adds, and the form."""

    body: Any
    prompt: ChatPrompt
    form: AnswerForm


def template_messages(messages: list[dict[str, Any]], kind: type[ChatMessage] = ChatMessage) -> list[dict[str, Any]]:
    """Return the messages without the fields that ask for nothing, such as ``refusal: null`` and ``tool_calls: []``.

    Raise `ApiError` for a message that is no ``kind``, or no message.
    """
    if not messages:
        raise ApiError(400, "messages is empty: a chat needs at least one message.", "messages", "invalid_value")
    found = []
    for i, message in enumerate(messages):
        fields = {
            name: value for name, value in message.items() if name in ("role", "content") or not is_neutral(value)
        }
        convert(fields, kind, f"messages[{i}]")
        found.append(fields)
    return found
