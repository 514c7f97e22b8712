"""How the answer to a chat is asked for and read: its text becomes *parts*, as it streams.

Models write reasoning and tool calls as text, in a form that depends on their family. An `AnswerReader` turns this text
into parts, and the responses of each API are made of the parts. So only the readers know families of models. An
extension of the API server chooses the form of each chat (`HttpExtension.answer_form`); without one, all text is
content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from minisgl.message import ChatPrompt
from minisgl.sampling_params import SamplingParams
from minisgl.server.errors import ApiError

if TYPE_CHECKING:
    from minisgl.server.protocol import ChatRequest


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer, to think."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins: the call number ``index`` of the answer, from 0. ``id`` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments of the call ``index``. The pieces are together the text of a JSON object.

    The text is not complete, or no JSON, if the answer was cut or the model made a mistake.
    """

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallBegin | CallArguments


class AnswerReader(Protocol):
    """Reads the answer of one choice. The parts do not depend on where the text is split, but for their own splits."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known after the next text. Text that may belong to a form is held back."""

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back. Called once, after the last text. It never fails."""


class PlainReader:
    """Reads answers of which all text is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class AnswerForm:
    """How the answer to one chat is asked for and read. This one asks for nothing, and reads all text as content."""

    @classmethod
    def plain(cls, body: ChatRequest) -> AnswerForm:
        """Return the form of a chat without an extension. Raise `ApiError` for a chat with tools."""
        if body.tools or body.tool_choice not in (None, "none", "auto"):
            name = "tools" if body.tools else "tool_choice"
            raise ApiError(400, f"{name} is not supported by this server.", name, "unsupported_parameter")
        return cls()

    def prompt(self, prompt: ChatPrompt) -> ChatPrompt:
        """Return the chat's prompt, such as one with tools."""
        return prompt

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the chat's parameters, such as some with a grammar. Raise `ApiError` for those that don't fit."""
        return params

    def reader(self) -> AnswerReader:
        """Return a new reader, for one choice."""
        return PlainReader()


class Chat(NamedTuple):
    """A chat that was read and checked: its request, its prompt with all that the form adds, and the form."""

    body: ChatRequest
    prompt: ChatPrompt
    form: AnswerForm


def partial_length(text: str, *marks: str) -> int:
    """Return the length of the longest end of ``text`` that is the beginning of one of ``marks``, but not all of it."""
    lengths = range(min(len(text), max(map(len, marks)) - 1), 0, -1)
    return next((n for n in lengths if any(len(m) > n and m.startswith(text[-n:]) for m in marks)), 0)


# ---- in the form of the OpenAI API -----------------------------------------------------------------------


def message_delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Return parts of an answer as the change of a chat's message: only the fields that the parts have.

    Reasoning is in ``reasoning``, as in vLLM, and in ``reasoning_content``, as in the API of DeepSeek.
    """
    found: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                found["content"] = found.get("content", "") + text
            case Reasoning(text):
                found["reasoning_content"] = found["reasoning"] = found.get("reasoning", "") + text
            case CallBegin(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return {**found, "tool_calls": list(calls.values())} if calls else found


def message(parts: Sequence[Part]) -> dict[str, Any]:
    """Return a whole answer as the fields of a chat's message. Its content is null if there are only tool calls."""
    found = message_delta(parts)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in found.pop("tool_calls", [])]
    return {"content": None if calls else "", **found, **({"tool_calls": calls} if calls else {})}
