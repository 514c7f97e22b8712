"""Bodies of ``POST /v1/responses`` as chats. Source: the reference of OpenAI's Responses API."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from minisgl.plugins.http.apis.translation import (
    ChatMessages,
    Translation,
    anything,
    check_entries,
    encode,
    get,
    unsupported,
    wrong,
)
from minisgl.server.errors import ApiError

PASSED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "skip_special_tokens", "chat_template_kwargs", "cache_salt",
    "priority", "stream", "parallel_tool_calls", "min_tokens",
)  # fmt: skip
"""The parameters that a chat has under the same name: OpenAI's, and those of vLLM and SGLang."""
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "grammar": "text.format",
        "logprobs": "include",
        "reasoning_effort": "reasoning.effort",
    }
)
"""Parameter of a chat → the parameter of this API."""
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
BUILT_IN = "_call.", "computer_call_output.", "message.input_image."
"""Parts of the entries of ``include`` that ask for more of built-in tools or images, of which there are none."""
OPTIONAL_TOOLS = frozenset({"web_search", "namespace"})
"""Types of tools that this server lacks, and that a client gets by without: a search of the web, and more functions."""
SEAL = "minisgl:"
"""The beginning of our ``encrypted_content``: base64 of the reasoning, which is no secret."""
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of a custom tool as a function."""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/responses``. An entry without a type here is checked as a chat's, or by `translate`."""

    HINTS: ClassVar = (
        "client_metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "metadata", "service_tier", "max_tool_calls", "text.verbosity", "reasoning.summary",
    )  # fmt: skip
    """Parameters that change no answer: they are accepted, and some are in the response."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    reasoning: dict[str, Any] = {}
    include: list[str] = []
    top_logprobs: int | None = None
    truncation: str = "disabled"
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = {}
    context_management: list[Any] = []

    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    skip_special_tokens: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    priority: Any = None
    parallel_tool_calls: Any = None
    min_tokens: Any = None

    client_metadata: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    metadata: dict[str, Any] = {}
    service_tier: Any = None
    max_tool_calls: Any = None

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the tools whose argument is a text."""
        return frozenset(tool["name"] for tool in self.tools if tool.get("type") == "custom")

    @property
    def input_items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        return self.input


def translate(body: ResponsesRequest, history: Sequence[dict[str, Any]] = ()) -> Translation:
    """Return the chat of a body. ``history`` are the items of earlier turns. Raise `ApiError`."""
    _check_options(body)
    chat = ChatMessages()
    if body.instructions:
        chat.add_texts("instructions", "system", [body.instructions])
    for i, item in enumerate(history):
        _add_item(chat, item, f"previous_response_id.items[{i}]")
    for i, item in enumerate(body.input_items):
        _add_item(chat, item, f"input[{i}]" if isinstance(body.input, list) else "input")
    fields = {name: value for name in PASSED if (value := getattr(body, name)) is not None}
    fields["messages"] = chat.finish()
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs or LOGPROBS in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning.get("effort") is not None:
        fields["reasoning_effort"] = body.reasoning["effort"]
    fields |= _text_options(body.text)
    fields |= _tool_options(body)
    return Translation(fields, chat.sources, NAMES)


# ---- options ----------------------------------------------------------------------------------------------


def _check_options(body: ResponsesRequest) -> None:
    """Raise `ApiError` for an option that would change the answer, and that this server does not have."""
    if body.background:
        unsupported("background", "true")
    if body.truncation != "disabled":
        unsupported("truncation", body.truncation)
    if body.context_management:
        unsupported("context_management")
    for i, entry in enumerate(body.include):
        if entry not in (LOGPROBS, ENCRYPTED) and not any(part in entry for part in BUILT_IN):
            unsupported(f"include[{i}]", entry)
    # No model here writes summaries of its reasoning: the reasoning itself is in the response.
    levels = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    reasoning: dict[str, Callable[[Any], bool]] = {
        "effort": lambda value: value in levels,
        "summary": lambda value: value in ("auto", "concise", "detailed", "none"),
        "generate_summary": lambda value: value in ("auto", "concise", "detailed"),
        "context": anything,
    }
    check_entries(body.reasoning, reasoning, "reasoning")
    check_entries(body.stream_options, {"include_obfuscation": lambda value: value is False}, "stream_options")
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true.", "stream_options")
    if len(body.metadata) > 16 or any(not isinstance(v, str) or len(v) > 512 for v in body.metadata.values()):
        wrong("metadata", "has at most 16 entries, which are strings of at most 512 characters.")


def _text_options(text: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a chat for ``text``."""
    levels = ("low", "medium", "high")
    check_entries(text, {"format": anything, "verbosity": lambda value: value in levels}, "text")
    form = get(text, "format", dict, "text", {"type": "text"})
    match form.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": form}
        case "json_schema":
            return {"response_format": {"type": "json_schema", "json_schema": {**form, "type": None}}}
    wrong("text.format.type", "must be text, json_object or json_schema.")


def _tool_options(body: ResponsesRequest) -> dict[str, Any]:
    """Return the parameters of a chat for ``tools`` and ``tool_choice``."""
    fields: dict[str, Any] = {}
    tools = _callable(body)
    if tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in tools]
    choice = body.tool_choice
    if isinstance(choice, dict):
        kind = get(choice, "type", str, "tool_choice")
        if kind not in ("function", "custom"):
            unsupported("tool_choice.type", kind)
        choice = {"type": "function", "function": {"name": get(choice, "name", str, "tool_choice")}}
    if choice is not None:
        fields["tool_choice"] = choice
    return fields


def _callable(body: ResponsesRequest) -> list[tuple[int, dict[str, Any]]]:
    """Return the tools, with their places in ``tools``, without those of OpenAI's servers that codex always adds.

    Where the model may choose among other tools, it is just not offered these (`OPTIONAL_TOOLS`). A request that has no
    other tool, or forces a call, is refused by name in `_tool`.
    """
    tools = list(enumerate(body.tools))
    others = [(i, tool) for i, tool in tools if tool.get("type") not in OPTIONAL_TOOLS]
    return others if others and body.tool_choice in (None, "auto", "none") else tools


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = get(tool, "type", str, path)
    if kind not in ("function", "custom"):
        unsupported(f"{path}.type", kind)
    name = get(tool, "name", str, path)
    function: dict[str, Any] = {"name": name, "description": get(tool, "description", str, path, "")}
    if tool.get("defer_loading"):
        unsupported(f"{path}.defer_loading")
    if kind == "custom":
        form = get(tool, "format", dict, path, {"type": "text"})
        if form.get("type") != "text":
            unsupported(f"{path}.format.type", str(form.get("type")))
        function["parameters"] = _CUSTOM
    else:
        function["parameters"] = get(tool, "parameters", dict, path, {"type": "object", "properties": {}})
        if tool.get("strict") is not None:
            function["strict"] = get(tool, "strict", bool, path)
    return {"type": "function", "function": function}


# ---- items ------------------------------------------------------------------------------------------------


def _add_item(chat: ChatMessages, item: dict[str, Any], path: str) -> None:
    """Add an item of ``input`` to the messages of a chat. Raise `ApiError` if no message can have it."""
    kind = item.get("type")
    match "message" if kind is None and "role" in item else kind:
        case "message":
            role = get(item, "role", str, path)
            texts = _texts(item.get("content"), f"{path}.content")
            if role == "assistant":
                chat.add_answer(path, texts)
            elif role in ("system", "developer") and all(m["role"] == "system" for m in chat.messages):
                chat.add_texts(path, "system", texts)  # templates have one system message, the first
            else:
                chat.add_texts(path, role, texts)
        case "reasoning":
            chat.add_reasoning(path, _reasoning(item, path))
        case "function_call":
            if item.get("namespace"):
                unsupported(f"{path}.namespace")
            arguments = get(item, "arguments", str, path)
            chat.add_call(path, get(item, "call_id", str, path), get(item, "name", str, path), arguments or "{}")
        case "custom_tool_call":
            arguments = encode({"input": get(item, "input", str, path)})
            chat.add_call(path, get(item, "call_id", str, path), get(item, "name", str, path), arguments)
        case "function_call_output" | "custom_tool_call_output":
            chat.add_result(path, get(item, "call_id", str, path), _texts(item.get("output"), f"{path}.output"))
        case None:
            wrong(f"{path}.type", "is missing.")
        case other:
            unsupported(f"{path}.type", str(other))


def _texts(content: Any, path: str) -> list[str]:
    """Return the texts of a content. Raise `ApiError` for another part, such as an image."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        wrong(path, "must be a string or a list of parts.")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            wrong(f"{path}[{i}]", "must be an object.")
        kind = get(part, "type", str, f"{path}[{i}]")
        if kind not in ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"):
            unsupported(f"{path}[{i}].type", kind)
        texts.append(get(part, "refusal" if kind == "refusal" else "text", str, f"{path}[{i}]"))
    return texts


def _reasoning(item: dict[str, Any], path: str) -> str:
    """Return the reasoning of an item: its content, or what this server wrote into its encrypted content."""
    content = item.get("content")
    if content:
        return "".join(_texts(content, f"{path}.content"))
    sealed = get(item, "encrypted_content", str, path, "")
    if sealed:
        try:
            if sealed.startswith(SEAL):
                return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            pass
        wrong(f"{path}.encrypted_content", "was not written by this server, which can't read it.")
    return "\n".join(_texts(item.get("summary") or [], f"{path}.summary"))


def seal(reasoning: str) -> str:
    """Return reasoning as ``encrypted_content``, from which `_reasoning` reads it."""
    return SEAL + base64.b64encode(reasoning.encode()).decode()
