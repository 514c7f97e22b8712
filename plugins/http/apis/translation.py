"""What the translations of other APIs have in common: the messages of a chat, and errors in the client's words.

A body of another API becomes the parameters of a `FullChatRequest`. The chat is then checked and answered as any other,
so its errors name parameters and messages of a chat. `Translation.rename` replaces them by what the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from minisgl.sampling_params import shorten
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.parsing import parse
from minisgl.server.protocol import Chat

T = TypeVar("T")
_MESSAGE = re.compile(r"messages\[([0-9]{1,9})\]")


@dataclass
class Translation:
    """The parameters of a chat that were made of another API's body.

    ``sources`` says for each message where it is in the client's body, such as ``input[3]``. ``names`` maps a parameter
    of a chat to the client's parameter.
    """

    fields: dict[str, Any]
    sources: list[str]
    names: Mapping[str, str]

    def read(self, api: Api) -> Chat:
        """Return the chat with these parameters. Raise `ApiError` with the client's names for an invalid one."""
        try:
            body = parse(msgspec.json.encode(self.fields), api.chat_request, api.check_fields)
            if api.dispatcher.max_seq_len:
                for check in api.check_body:
                    check(body, api.dispatcher.max_seq_len)
            return api.prepare_chat(body)
        except ApiError as error:
            raise self.rename(error) from None

    def rename(self, error: ApiError) -> ApiError:
        """Return an error of the chat in the client's words."""
        found = _MESSAGE.search(error.message)
        message = _MESSAGE.sub(lambda match: self._source(int(match[1]), match[0]), error.message)
        name = self.names.get(error.param or "")
        if name is None:
            return ApiError(error.status, message, error.param, error.code, error.headers)
        message = re.sub(rf"\b{re.escape(error.param or '')}\b(?!\[)", name, message)
        param = self._source(int(found[1]), name) if found and error.param == "messages" else name
        return ApiError(error.status, message, param, error.code, error.headers)

    def _source(self, i: int, default: str) -> str:
        return self.sources[i] if i < len(self.sources) else default


@dataclass
class ChatMessages:
    """The messages of a chat, as they are made of the parts of another API's conversation.

    Such an API has reasoning, texts and tool calls of one turn as parts in a row. A chat has one message for them.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, source: str, message: dict[str, Any]) -> None:
        """Append a message. ``source`` is its place in the client's body."""
        self.messages.append(message)
        self.sources.append(source)

    def add_texts(self, source: str, role: str, texts: list[str]) -> None:
        """Append texts, which belong to the last message if it has the same role."""
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += texts
        elif texts:
            self.add(source, {"role": role, "content": [*texts]})

    def add_answer(self, source: str, texts: list[str]) -> None:
        """Append texts of the assistant's turn. Those after a tool call begin a new message."""
        self._turn(source, without=("tool_calls",))["content"] += texts

    def add_reasoning(self, source: str, text: str) -> None:
        """Append reasoning of the assistant's turn. What follows a text or a tool call begins a new message."""
        turn = self._turn(source, without=("tool_calls", "content"))
        turn["reasoning_content"] = "\n".join(filter(None, [turn.get("reasoning_content"), text]))

    def add_call(self, source: str, call_id: str, name: str, arguments: str) -> None:
        """Append a tool call of the assistant's turn. ``arguments`` is JSON."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn(source).setdefault("tool_calls", []).append(call)

    def add_result(self, source: str, call_id: str, texts: list[str]) -> None:
        """Append the result of a tool call."""
        self.add(source, {"role": "tool", "tool_call_id": call_id, "content": [*texts]})

    def finish(self) -> list[dict[str, Any]]:
        """Return the messages. Their texts are joined with line breaks, as those of a chat's content parts."""
        for message in self.messages:
            texts = message["content"]
            message["content"] = None if message.get("tool_calls") and not texts else "\n".join(texts)
        return self.messages

    def _turn(self, source: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the assistant's last message, or a new one if it is not the last or has one of these fields."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(name) for name in without):
            last = {"role": "assistant", "content": []}
            self.add(source, last)
        return last


# ---- reading values that have no schema --------------------------------------------------------------------


def wrong(param: str, what: str) -> NoReturn:
    """Raise `ApiError` (400) for a value of the client. The error's message begins with its place ``param``."""
    raise ApiError(400, f"{shorten(param)} {shorten(what, 200)}", shorten(param), "invalid_value")


def unsupported(param: str, what: str = "") -> NoReturn:
    """Raise `ApiError` (400) for a value that would change the answer, and that this server does not support."""
    message = f"{shorten(param)}{what and ' ' + shorten(repr(what))} is not supported by this server."
    raise ApiError(400, message, shorten(param), "unsupported_parameter")


def get(value: Mapping[str, Any], name: str, kind: type[T], path: str, default: T | None = None) -> T:
    """Return an entry of an object at ``path``. An entry that is null is missing. Raise `ApiError`."""
    found = value.get(name)
    if found is None:
        if default is None:
            wrong(f"{path}.{name}", "is missing.")
        return default
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        names = {str: "a string", list: "a list", dict: "an object", bool: "true or false", int: "an integer"}
        wrong(f"{path}.{name}", f"must be {names[kind]}.")
    return found


def check_entries(value: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]], path: str) -> None:
    """Raise `ApiError` for an entry that is not known, or has a value that the function of its name does not accept.

    An entry that is null is missing.
    """
    for name, entry in value.items():
        if entry is None:
            continue
        if name not in known:
            raise ApiError(
                400, f"Unknown field {shorten(f'{path}.{name}')}.", shorten(f"{path}.{name}"), "unknown_parameter"
            )
        if not known[name](entry):
            text = entry if isinstance(entry, str) else ""
            unsupported(f"{path}.{name}", text)


def anything(value: Any) -> bool:
    """Accept every value, in `check_entries`."""
    return True


def encode(value: Any) -> str:
    """Return a JSON value as text, as tool calls have it."""
    return msgspec.json.encode(value).decode()
