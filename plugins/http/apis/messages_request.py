"""Bodies of ``POST /v1/messages`` as chats. Source: the reference of Anthropic's Messages API."""

from __future__ import annotations

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

PASSED = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "cache_salt", "priority", "seed", "min_p")
"""The parameters that a chat has under the same name. The last five are minisgl's, not Anthropic's."""
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "prompt": "messages",
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config.format",
        "grammar": "output_config.format",
    }
)
"""Parameter of a chat → the parameter of this API."""
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""The only edit of ``context_management`` that is accepted: it removes nothing."""
TOOL_TYPES = (None, "custom")
"""The types of tools whose calls the client runs, and whose schema is in the request."""


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/messages/count_tokens``: that of ``POST /v1/messages`` without what the output needs."""

    HINTS: ClassVar = (
        "metadata", "service_tier", "speed", "inference_geo", "diagnostics", "cache_control", "thinking.budget_tokens",
        "thinking.display",
    )  # fmt: skip
    """Parameters that change no answer."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    output_format: dict[str, Any] = {}
    context_management: dict[str, Any] = {}
    mcp_servers: list[Any] = []
    chat_template_kwargs: dict[str, Any] = {}
    cache_control: Any = None
    speed: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of ``POST /v1/messages``. An entry without a type is checked as a chat's, or has no effect."""

    max_tokens: int
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    cache_salt: Any = None
    priority: Any = None

    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None


def translate(body: CountTokensRequest) -> Translation:
    """Return the chat of a body. Raise `ApiError`."""
    _check_options(body)
    chat = ChatMessages()
    system = [body.system] if isinstance(body.system, str) else _texts(body.system, "system")
    chat.add_texts("system", "system", [text for text in system if text])
    for i, message in enumerate(body.messages):
        _add_message(chat, message, f"messages[{i}]")
    fields = {name: value for name in PASSED if (value := getattr(body, name, None)) is not None}
    fields["messages"] = chat.finish()
    if fields["messages"] and fields["messages"][-1]["role"] == "assistant":  # a prefilled answer
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            wrong("max_tokens", "must be at least 1.")
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    kind, effort = body.thinking.get("type"), body.output_config.get("effort")
    if kind in ("enabled", "disabled"):
        fields["enable_thinking"] = kind == "enabled"
    if effort is not None:
        fields["reasoning_effort"] = effort
    form = get(body.output_config, "format", dict, "output_config", body.output_format)
    if form:
        if form.get("type") != "json_schema":
            wrong("output_config.format.type", "must be json_schema.")
        schema = get(form, "schema", dict, "output_config.format")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields |= _tool_options(body)
    return Translation(fields, chat.sources, NAMES)


# ---- options ----------------------------------------------------------------------------------------------


def _check_options(body: CountTokensRequest) -> None:
    """Raise `ApiError` for an option that would change the answer, and that this server does not have."""
    if body.mcp_servers:
        unsupported("mcp_servers")
    if body.context_management:
        check_entries(body.context_management, {"edits": lambda value: isinstance(value, list)}, "context_management")
        for i, edit in enumerate(body.context_management.get("edits") or []):
            if edit != KEEP_ALL:
                kind = edit.get("type") if isinstance(edit, dict) else None
                unsupported(f"context_management.edits[{i}]", str(kind or ""))
    levels = ("low", "medium", "high", "xhigh", "max")
    check_entries(body.output_config, {"format": anything, "effort": lambda value: value in levels}, "output_config")
    thinking: dict[str, Callable[[Any], bool]] = {
        "type": lambda value: value in ("enabled", "disabled", "adaptive"),
        "budget_tokens": lambda value: isinstance(value, int) and value > 0,
        "display": lambda value: value in ("summarized", "omitted"),
    }
    check_entries(body.thinking, thinking, "thinking")


def _tool_options(body: CountTokensRequest) -> dict[str, Any]:
    """Return the parameters of a chat for ``tools`` and ``tool_choice``."""
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if not choice:
        return fields
    known: dict[str, Callable[[Any], bool]] = {
        "type": lambda value: value in ("auto", "any", "tool", "none"),
        "name": anything,
        "disable_parallel_tool_use": lambda value: isinstance(value, bool),
    }
    check_entries(choice, known, "tool_choice")
    kind = get(choice, "type", str, "tool_choice")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": get(choice, "name", str, "tool_choice")}}
    else:
        fields["tool_choice"] = "required" if kind == "any" else kind
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") not in TOOL_TYPES:
        unsupported(f"{path}.type", str(tool["type"]))
    for name in ("defer_loading", "input_examples"):
        if tool.get(name):
            unsupported(f"{path}.{name}")
    if any(caller != "direct" for caller in get(tool, "allowed_callers", list, path, [])):
        unsupported(f"{path}.allowed_callers")
    function: dict[str, Any] = {"name": get(tool, "name", str, path)}
    function["description"] = get(tool, "description", str, path, "")
    function["parameters"] = get(tool, "input_schema", dict, path)
    if tool.get("strict") is not None:
        function["strict"] = get(tool, "strict", bool, path)
    return {"type": "function", "function": function}


# ---- messages ---------------------------------------------------------------------------------------------


def _add_message(chat: ChatMessages, message: dict[str, Any], path: str) -> None:
    """Add a message of the conversation to a chat. Raise `ApiError` for a block that a chat can't have."""
    check_entries(message, {"role": anything, "content": anything}, path)
    role, content = get(message, "role", str, path), message.get("content")
    if role not in ("user", "assistant", "system"):
        wrong(f"{path}.role", "must be user, assistant or system.")
    blocks: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        wrong(f"{path}.content", "must be a string or a list of blocks.")
    for i, block in enumerate(blocks):
        if not isinstance(block, dict):
            wrong(f"{path}.content[{i}]", "must be an object.")
        _add_block(chat, role, block, path, f"{path}.content[{i}]")


def _add_block(chat: ChatMessages, role: str, block: dict[str, Any], source: str, path: str) -> None:
    match role, get(block, "type", str, path):
        case "assistant", "text":
            chat.add_answer(source, [get(block, "text", str, path)])
        case _, "text":
            chat.add_texts(source, role, [get(block, "text", str, path)])
        case "assistant", "thinking":
            chat.add_reasoning(source, get(block, "thinking", str, path))
        case "assistant", "tool_use":
            arguments = encode(get(block, "input", dict, path))
            chat.add_call(source, get(block, "id", str, path), get(block, "name", str, path), arguments)
        case "user", "tool_result":
            content = block.get("content") or ""
            texts = [content] if isinstance(content, str) else _texts(content, f"{path}.content")
            if block.get("is_error"):  # a chat has no such mark
                texts = ["Error: " + "\n".join(texts)]
            chat.add_result(source, get(block, "tool_use_id", str, path), texts)
        case _, kind:
            unsupported(f"{path}.type", kind)


def _texts(blocks: Sequence[Any], path: str) -> list[str]:
    """Return the texts of blocks. Raise `ApiError` for another block, such as an image."""
    texts = []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict):
            wrong(f"{path}[{i}]", "must be an object.")
        kind = get(block, "type", str, f"{path}[{i}]")
        if kind != "text":
            unsupported(f"{path}[{i}].type", kind)
        texts.append(get(block, "text", str, f"{path}[{i}]"))
    return texts
