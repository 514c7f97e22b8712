"""The request bodies of the HTTP API, as structs. `minisgl.server.parsing` reads them.

This module knows the types and ranges of the parameters, and nothing about models. A parameter that is a field of a
struct here is supported. Any other parameter is refused with an error that names it, unless an extension removes it
(`minisgl.plugins.http.compatible`).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from minisgl.message import ChatPrompt
from minisgl.sampling_params import Grammar, InvalidRequestError, SamplingParams, shorten
from minisgl.server.errors import NO_NAMES, ApiError
from minisgl.server.parsing import convert
from minisgl.utils.json_file import is_neutral

FIELD_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tool_calls": ("assistant",),
        "reasoning_content": ("assistant",),
        "reasoning": ("assistant",),
        "tool_call_id": ("tool", "function"),
    }
)
"""The fields of a message that only messages of some roles have: name → these roles."""

DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters whose default a model's generation_config.json may set, besides the limit of the output."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameter ``stream_options``.

    ``include_usage`` adds a last chunk with the usage of all choices. With it, ``continuous_usage_stats`` adds
    the usage so far to each chunk, as in vLLM.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The parameters that chat and plain completions share.

    Their names and meanings are those of the OpenAI API, or else of vLLM. A sampling parameter that is None takes the
    server's default.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    repetition_penalty: float | None = None
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

    @property
    def begun(self) -> str:
        """The text that the answer continues, and that belongs to the text of a grammar."""
        return ""

    @property
    def num_kept_tokens(self) -> int:
        """The number of tokens at the end of a prompt that are kept, or 0 for all. Raise `ApiError`."""
        given = self.truncate_prompt_tokens
        if given is not None and given < 1:
            raise ApiError(400, "truncate_prompt_tokens must be at least 1.", "truncate_prompt_tokens", "invalid_value")
        return given or 0

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def params(
        self, max_tokens: int, logprobs: int | None, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> SamplingParams:
        """Return the request's sampling parameters. Raise `ApiError` if a value is out of its range.

        ``max_tokens`` and ``logprobs`` are given by the caller, because chat and plain completions have different
        parameters for them. ``defaults`` are the values of the parameters that the request leaves out, by name.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only allowed with stream: true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs is not available with stream: true.", "prompt_logprobs")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        given = {name: getattr(self, name) for name in DEFAULT_FIELDS}
        sampling = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        params = SamplingParams(
            **{name: sampling[name] for name in DEFAULT_FIELDS if name in sampling},
            max_tokens=max_tokens,
            seed=self.seed,
            n=self.n,
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(token): bias for token, bias in self.logit_bias.items()},
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            skip_special_tokens=self.skip_special_tokens,
            grammar=self.grammar and msgspec.structs.replace(self.grammar, prefix=self.begun),
            min_tokens=self.min_tokens,
            bad_words=tuple(self.bad_words),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
        )
        try:
            params.check()
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error, self.names) from None
        return params


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One chat message. A field besides role and content is refused unless the chat template uses it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def check(self) -> None:
        """Raise `ApiError` for a field of another role's messages."""
        for name, roles in FIELD_ROLES.items():
            if getattr(self, name) and self.role not in roles:
                message = (
                    f"{name} belongs to a message of the role {' or '.join(roles)}, not {shorten(repr(self.role))}."
                )
                raise ApiError(400, message, "messages", "invalid_value")


class ChatRequest(GenerateRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``. `minisgl.server.answer.AnswerForm` uses the parameters of tools.

    Without ``max_tokens`` and ``max_completion_tokens``, the output may fill the rest of the context.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
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
        renamed = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"prompt": "messages", **renamed}

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
        """The value for `SamplingParams.logprobs`: the number of alternatives of each token, None for no logprobs."""
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


# ---- prompts -----------------------------------------------------------------------------------------


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without the fields that ask for nothing, such as ``refusal: null`` and ``tool_calls: []``.

    Raise `ApiError` for an invalid message or no message.
    """
    if not messages:
        raise ApiError(400, "messages is empty: a chat needs at least one message.", "messages", "invalid_value")
    found = []
    for i, message in enumerate(messages):
        fields = {
            name: value for name, value in message.items() if name in ("role", "content") or not is_neutral(value)
        }
        convert(fields, ChatMessage, f"messages[{i}]").check()
        found.append(fields)
    return found


def chat_prompt(
    messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any], continues: bool = False
) -> ChatPrompt:
    """Return checked messages as a prompt: ``continue_final_message`` if it ``continues`` one. Raise `ApiError`."""
    if continues and add_generation_prompt:
        what = "continue_final_message needs add_generation_prompt: false, because it begins no new message."
        raise ApiError(400, what, "add_generation_prompt", "invalid_value")
    return ChatPrompt(template_messages(messages), add_generation_prompt, kwargs, continue_final_message=continues)


def _token_id(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise ApiError(400, f"logit_bias: {reprlib.repr(text)} is not a token id.", "logit_bias", "invalid_value")
    return int(text)
