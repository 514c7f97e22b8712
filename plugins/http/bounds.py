"""Bounds of the work of one HTTP request: the sizes of its parameters, the number of its choices and of its parts.

Each size is checked before any work on the value. The tokenizers bound the length of a text
(`minisgl.server.text_process`). But a chat of 36,000 empty messages has almost no text, and rendering it takes a
second, so the parts of a chat are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.message import Prompt
from minisgl.plugins.http import HttpConfig
from minisgl.sampling_params import InvalidRequestError, SamplingParams, shorten, too_long
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import RequestRecord

MAX_FIELD = 2**16
"""The largest size in bytes of a parameter, as JSON, that is not one of `LARGE_FIELDS`."""
LARGE_FIELDS = frozenset({"prompt", "messages", "tokens", "input", "instructions", "system", "tools"})
"""The parameters that may be as large as the body."""
MAX_FIELDS = 256
"""The largest number of parameters of a body, those with the value null included."""
MAX_PROMPTS = 4096
"""The largest number of prompts of a plain completion."""
MAX_DEPTH = 64
"""The largest number of nested lists and objects in ``chat_template_kwargs``, ``tools`` and ``tool_calls``."""
MAX_N = 128
"""The largest ``n``."""
VALUES_PER_TOKEN = 4
"""The largest number of JSON values inside the fields of all messages, for each token that the server allows."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Bounds(config.server)


class Bounds(HttpExtension):
    """Refuses requests with more choices than ``server.max_choices``, and chats with more parts than tokens."""

    options = ("max_choices",)

    def __init__(self, server: HttpConfig):
        most = server.max_choices
        self._max_choices = default_choices(server.max_queued) if most is None else most

    def admit(self, prompts: Sequence[Prompt], params: SamplingParams, record: RequestRecord) -> None:
        if len(prompts) * params.n > self._max_choices:
            raise ApiError(
                400,
                f"The request asks for {len(prompts) * params.n} choices: n={params.n} for each of {len(prompts)} "
                f"prompts. A request may have at most {self._max_choices} (server.max_choices): send several requests.",
                "prompt" if len(prompts) > 1 else "n",
                "invalid_value",
            )

    def check_fields(self, kind: type, fields: dict[str, msgspec.Raw]) -> None:
        if len(fields) > MAX_FIELDS:
            raise ApiError(400, f"The body has more than {MAX_FIELDS} parameters.", code="invalid_value")
        for name, raw in fields.items():
            _check_size(name, bytes(memoryview(raw)))

    def check_body(self, body: msgspec.Struct, max_seq_len: int) -> None:
        prompt = getattr(body, "prompt", None)
        if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and type(prompt[0]) is not int:
            raise _too_many_prompts()
        messages = getattr(body, "messages", None)
        if messages is None:
            return
        variables, tools = getattr(body, "chat_template_kwargs", {}), getattr(body, "tools", [])
        try:
            check_chat_size(messages, {**variables, "tools": tools}, max_seq_len)
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from None
        check_json(variables, "chat_template_kwargs")
        check_json(tools, "tools")
        for message in messages:
            check_json(message.get("tool_calls"), "messages")
            check_json(message.get("content"), "messages")


def check_chat_size(messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], max_seq_len: int) -> None:
    """Raise `InvalidRequestError` for a chat that is too large to be rendered.

    Each message costs at least a token, so there are at most ``max_seq_len`` messages. Content parts, tool calls and
    template variables have at most `VALUES_PER_TOKEN` JSON values a token.
    """
    if len(messages) > max_seq_len:
        raise too_long(
            "messages", max_seq_len, f"The chat has {len(messages)} messages, and each costs at least a token."
        )
    left = VALUES_PER_TOKEN * max_seq_len
    todo: list[Any] = [value for message in messages for value in message.values()]
    todo += kwargs.values()
    while todo:
        value = todo.pop()
        children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        left -= len(children)
        if left < 0:
            values = f"The chat has more than {VALUES_PER_TOKEN * max_seq_len} values in content parts, tools, calls"
            raise too_long("messages", max_seq_len, f"{values} and chat_template_kwargs.")
        todo += children


def default_choices(max_open: int) -> int:
    """Return the default of ``server.max_choices``: a quarter of the open requests, but not less than the largest n."""
    return min(max_open, max(MAX_N, max_open // 4))


def _check_size(name: str, raw: bytes) -> None:
    """Raise `ApiError` if a parameter, given as JSON, is too large to be decoded."""
    if name not in LARGE_FIELDS and len(raw) > MAX_FIELD:
        name = shorten(name)
        raise ApiError(400, f"{name} is larger than {MAX_FIELD} bytes.", name, "invalid_value")
    if name == "prompt" and b'"' not in raw and raw.count(b"[") > MAX_PROMPTS + 1:  # lists of token ids
        raise _too_many_prompts()


def _too_many_prompts() -> ApiError:
    return ApiError(400, f"A request has at most {MAX_PROMPTS} prompts.", "prompt", "invalid_value")


def check_json(value: Any, param: str) -> None:
    """Check a JSON value that has no schema. Raise `ApiError` if it can't be sent to another process.

    Such a value has more than `MAX_DEPTH` nested lists and objects, or an integer of more than 64 bits.
    """
    level, depth = [value], 0
    while level:
        for item in level:
            if isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise ApiError(400, f"{param} has an integer of more than 64 bits.", param, "invalid_value")
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
        if depth > MAX_DEPTH + 1:
            message = f"{param} has more than {MAX_DEPTH} nested lists and objects."
            raise ApiError(400, message, param, "invalid_value")
