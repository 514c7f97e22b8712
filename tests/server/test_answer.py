"""The parts of an answer in the form of chat completions, in full and streamed."""

from __future__ import annotations

from typing import Any

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content, Part, Reasoning
from minisgl.plugins.http.apis.full_answer import FullBuilder, ReadForm, message, message_delta


class Marked:
    """A reader of made-up answers: ``?`` begins reasoning, ``!`` a tool call, and other text is content."""

    def __init__(self) -> None:
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for word in text.split():
            if word.startswith("?"):
                parts.append(Reasoning(word[1:]))
            elif word.startswith("!"):
                name, _, arguments = word[1:].partition("=")
                parts += [CallBegin(self._calls, f"call_{self._calls}", name), CallArguments(self._calls, arguments)]
                self._calls += 1
            else:
                parts.append(Content(word))
        return parts

    def finish(self) -> list[Part]:
        return [Content(".")]


class MarkedForm(ReadForm):
    def reader(self) -> Marked:
        return Marked()


def builder() -> FullBuilder:
    made = FullBuilder(model="m")
    made.form = MarkedForm()
    return made


def test_full_message() -> None:
    choice = builder().new_choice(0)
    choice.add(Delta(1, "?so !f={} !g=[]", [5, 6]))
    choice.add(Delta(1, "text", [7], finish=Finished(1, "stop", prompt_tokens=3, output_tokens=3)))
    body = builder().full([choice])
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "refusal": None,
        "content": "text.",
        "reasoning": "so",
        "reasoning_content": "so",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "[]"}},
        ],
    }
    assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_chunks_keep_their_reader() -> None:
    make = builder()
    choice = make.new_choice(0)
    choice.add(Delta(1, "!f={}", [5]))
    first = make.chunk(choice)["choices"][0]
    function: Any = {"name": "f", "arguments": "{}"}
    call = {"index": 0, "id": "call_0", "type": "function", "function": function}
    assert (first["delta"], first["finish_reason"]) == ({"tool_calls": [call]}, None)
    choice = choice.next_chunk()
    choice.add(Delta(1, "!g={}", [6], finish=Finished(1, "stop")))
    last = make.chunk(choice)["choices"][0]
    assert [each["index"] for each in last["delta"]["tool_calls"]] == [1]
    assert last["finish_reason"] == "tool_calls"


def test_calls_that_are_cut_end_by_length() -> None:
    choice = builder().new_choice(0)
    choice.add(Delta(1, "!f={", [5], finish=Finished(1, "length")))
    assert builder().chunk(choice)["choices"][0]["finish_reason"] == "length"


def test_content_is_null_only_beside_calls() -> None:
    assert message([]) == {"content": ""}
    assert message([Reasoning("so")])["content"] == ""
    assert message([CallBegin(0, "1", "f")])["content"] is None


def test_pieces_of_arguments() -> None:
    """A piece of a call that began in an earlier chunk has neither id nor name."""
    pieces: list[Part] = [CallArguments(1, '{"a"'), CallArguments(1, ": 1}")]
    assert message_delta(pieces) == {"tool_calls": [{"index": 1, "function": {"arguments": '{"a": 1}'}}]}
