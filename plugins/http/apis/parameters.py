"""The parameters of chats and plain completions beyond those of the core, and what they have in common.

`FullChatRequest` is the body of a chat with all of them. `FullFormat`, the base of the extensions that need them, lets
the server read and answer chats in this way. The names and meanings are those of the OpenAI API, or else of vLLM.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from minisgl.message import ChatPrompt
from minisgl.plugins.http.apis.full_answer import FullBuilder
from minisgl.plugins.http.apis.names import NO_NAMES, renamed
from minisgl.sampling_params import Grammar, SamplingParams, shorten
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import ResponseBuilder
from minisgl.server.protocol import (
    AnswerForm,
    ChatMessage,
    GenerateRequest,
    template_messages,
)

FIELD_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tool_calls": ("assistant",),
        "reasoning_content": ("assistant",),
        "reasoning": ("assistant",),
        "tool_call_id": ("tool", "function"),
    }
)
"""The fields of a message that only messages of some roles have: name → these roles."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameter ``stream_options``. ``include_usage`` adds a last chunk with the usage of all choices.

    With it, ``continuous_usage_stats`` adds the usage so far to each chunk, as in vLLM.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class FullGenerateRequest(GenerateRequest, kw_only=True):
    """The parameters that chats and plain completions share."""

    stream_options: StreamOptions | None = None
    stop_token_ids: list[int] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    grammar: Grammar | None = None
    min_tokens: int = 0
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names of fields that have another name in the core, for error messages."""
        return NO_NAMES

    def params(self, max_tokens: int, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        try:
            return super().params(max_tokens, defaults)
        except ApiError as error:
            raise renamed(error, self.names) from None

    @property
    def begun(self) -> str:
        """The text that the answer continues, and that belongs to the text of a grammar."""
        return ""

    @property
    def num_logprobs(self) -> int | None:
        """The value for `SamplingParams.logprobs`: the number of alternatives of each token, None for no logprobs."""
        return None

    @property
    def num_kept_tokens(self) -> int:
        """The number of tokens at the end of a prompt that are kept, or 0 for all. Raise `ApiError`."""
        given = self.truncate_prompt_tokens
        if given is not None and given < 1:
            raise ApiError(400, "truncate_prompt_tokens must be at least 1.", "truncate_prompt_tokens", "invalid_value")
        return given or 0

    def more_params(self) -> dict[str, Any]:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only allowed with stream: true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs is not available with stream: true.", "prompt_logprobs")
        return {
            "stop_token_ids": tuple(self.stop_token_ids),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": {_token_id(token): bias for token, bias in self.logit_bias.items()},
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "skip_special_tokens": self.skip_special_tokens,
            "grammar": self.grammar and msgspec.structs.replace(self.grammar, prefix=self.begun),
            "min_tokens": self.min_tokens,
            "bad_words": tuple(self.bad_words),
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }

    def builder_options(self) -> dict[str, Any]:
        options = self.stream_options
        return {
            **super().builder_options(),
            "token_ids": self.return_token_ids,
            "names": self.names,
            "include_usage": options is not None and options.include_usage,
            "continuous_usage": options is not None and options.continuous_usage_stats,
            "logprobs": self.num_logprobs is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
        }


class FullChatMessage(ChatMessage, forbid_unknown_fields=True):
    """A message that may have tool calls and reasoning."""

    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FullChatRequest(FullGenerateRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``. `minisgl.plugins.http.tools` uses the parameters of tools.

    Without ``max_tokens`` and ``max_completion_tokens``, the output may fill the rest of the context.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    parallel_tool_calls: bool = True

    @property
    def names(self) -> Mapping[str, str]:
        limit = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"prompt": "messages", **limit}

    @property
    def token_limit(self) -> int | None:
        """The value of ``max_completion_tokens``, or of ``max_tokens``, its older name. None if neither is set.

        Raise `ApiError` if they are set to different values.
        """
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise ApiError(400, "max_tokens and max_completion_tokens are two names of one limit.", "max_tokens")
        return old if new is None else new

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is only allowed with logprobs: true.", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= SamplingParams.MAX_LOGPROBS:
            raise ApiError(400, f"top_logprobs must be between 0 and {SamplingParams.MAX_LOGPROBS}.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def begun(self) -> str:
        content = self.messages[-1].get("content") if self.continue_final_message else ""
        parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        return "\n".join(part for part in parts if isinstance(part, str))

    @property
    def optional_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template that say whether and how much to think, if the template reads them."""
        effort, thinks = self.reasoning_effort, self.enable_thinking
        thinks = False if thinks is None and effort == "none" else thinks
        given = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        return {name: value for name, value in given.items() if value is not None}

    def to_prompt(self) -> ChatPrompt:
        """Return the messages as a prompt, with the tools unless none may be called. Raise `ApiError`."""
        kwargs = self.chat_template_kwargs
        prompt = chat_prompt(self.messages, self.add_generation_prompt, kwargs, self.continue_final_message)
        tools = [] if self.tool_choice == "none" else self.tools
        kept, optional = self.num_kept_tokens, self.optional_kwargs
        return msgspec.structs.replace(prompt, num_kept_tokens=kept, tools=tools, optional_kwargs=optional)

    def form(self) -> AnswerForm:
        """Return the form of the answer without the extension ``tools``. Raise `ApiError` for a chat with tools."""
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            name = "tools" if self.tools else "tool_choice"
            raise ApiError(400, f"{name} is not supported by this server.", name, "unsupported_parameter")
        return AnswerForm()


class FullFormat(HttpExtension):
    """An extension of a server whose chats have all parameters."""

    def chat_format(self) -> tuple[type[Any], type[ResponseBuilder]]:
        return FullChatRequest, FullBuilder


def chat_prompt(
    messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any], continues: bool = False
) -> ChatPrompt:
    """Return checked messages as a prompt: ``continue_final_message`` if it ``continues`` one. Raise `ApiError`."""
    if continues and add_generation_prompt:
        what = "continue_final_message needs add_generation_prompt: false, because it begins no new message."
        raise ApiError(400, what, "add_generation_prompt", "invalid_value")
    checked = template_messages(messages, FullChatMessage)
    for message in checked:
        _check_role(message)
    return ChatPrompt(checked, add_generation_prompt, kwargs, continue_final_message=continues)


def _check_role(message: Mapping[str, Any]) -> None:
    """Raise `ApiError` for a field of another role's messages."""
    for name, roles in FIELD_ROLES.items():
        if message.get(name) and message["role"] not in roles:
            what = (
                f"{name} belongs to a message of the role {' or '.join(roles)}, not {shorten(repr(message['role']))}."
            )
            raise ApiError(400, what, "messages", "invalid_value")


def _token_id(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise ApiError(400, f"logit_bias: {reprlib.repr(text)} is not a token id.", "logit_bias", "invalid_value")
    return int(text)


# ---- parameters that are not decoded yet: `HttpExtension.check_fields` -------------------------------------------


def decode_field(name: str, raw: msgspec.Raw) -> Any:
    """Return the value of a parameter. Raise `ApiError`, which names the parameter, if it is not valid JSON."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:  # the only one for a value without a type
        what = "has a number that is out of range: JSON has no number beyond 1.8e308."
    except UnicodeDecodeError as error:
        what = f"is not valid JSON: it must be in UTF-8 ({error.reason})."
    except msgspec.DecodeError:  # the value is complete, so only an escape in a string may be wrong
        what = r"is not valid JSON: an escape such as \ud83d, one half of a surrogate pair, is no character."
    except RecursionError:
        what = "has too many nested lists and objects."
    name = shorten(name)
    raise ApiError(400, f"{name} {what}", name, "invalid_value")


def with_whole_numbers(name: str, raw: msgspec.Raw) -> msgspec.Raw:
    """Return a parameter with integers in place of numbers such as 3.0: JSON makes no difference.

    So are the numbers in a list, and in lists in it. Raise `ApiError` as `decode_field`.
    """
    data = bytes(memoryview(raw)) if bytes(memoryview(raw)[:1]) in _NUMBERS else b""
    if b'"' in data or not (b"." in data or b"e" in data or b"E" in data):
        return raw
    return msgspec.Raw(msgspec.json.encode(_whole(decode_field(name, raw))))


_NUMBERS = frozenset(b"%c" % character for character in b"-[0123456789")
"""How a number or a list begins."""


def _whole(value: Any, depth: int = 2) -> Any:
    """Return a number such as 3.0 as an integer. ``depth`` is how many lists may be inside each other."""
    if depth and isinstance(value, list):
        changed = {float, list} if depth > 1 else {float}
        return value if changed.isdisjoint(map(type, value)) else [_whole(each, depth - 1) for each in value]
    return int(value) if isinstance(value, float) and abs(value) < 2**53 and value.is_integer() else value
