"""Chats with gpt-oss: its special tokens are read although the client does not see them, and no grammar is possible."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.plugins.http.apis.full_answer import message
from minisgl.plugins.http.tools import Choice, ToolForm
from minisgl.plugins.reasoning_parser.harmony import HarmonyReasoning
from minisgl.plugins.tool_parser.harmony import MARKS, HarmonyParser
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.server.errors import ApiError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
THINKS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
SPECIAL = (*MARKS, "<|endoftext|>")


def form(tools: bool, is_forced: bool = False, reasons: bool = True) -> ToolForm:
    choice = Choice((TOOL,), is_forced) if tools else Choice()
    return ToolForm(choice, HarmonyParser(), HarmonyReasoning() if reasons else None, False, SPECIAL)


@pytest.mark.parametrize("tools", [False, True])
def test_an_answer(tools: bool) -> None:
    chat = form(tools)
    assert not chat.params(SamplingParams()).skip_special_tokens
    reader = chat.reader()
    text = f"{THINKS}<|channel|>final<|message|>Yes.<|endoftext|>"
    found = message([*reader.feed(text), *reader.finish()])
    assert found == {"content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Hm."}


def test_a_call() -> None:
    reader = form(True).reader()
    text = f'{THINKS} to=functions.f<|channel|>commentary <|constrain|>json<|message|>{{"a": 1}}<|call|>'
    found: dict[str, Any] = message([*reader.feed(text), *reader.finish()])
    assert found["content"] is None
    assert [call["function"] for call in found["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]


def test_no_grammar() -> None:
    grammar = SamplingParams(grammar=Grammar("json_schema", "{}", "response_format"))
    for chat, params, field in (
        (form(False), grammar, "response_format"),
        (form(True, is_forced=True), SamplingParams(), "tool_choice"),
        (form(True, is_forced=True, reasons=False), SamplingParams(), "tool_choice"),
    ):
        with pytest.raises(ApiError, match=r"with this model") as refusal:
            chat.params(params)
        assert (refusal.value.status, refusal.value.param) == (400, field)
