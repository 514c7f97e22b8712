"""A whole turn of an agent with ``tutor``: the model decides to call a tool, and uses the tool's result."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from minisgl.plugins.command.demo import CALCULATOR, calculator
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once
OTHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GIVEN: dict[str, Any] = {"model": "tutor", "temperature": 0, "max_tokens": 100, "tools": [OTHER, CALCULATOR]}


@pytest.fixture
def client(tutor: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tutor.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, messages: list[Any]) -> Any:
    """Return the message of a streamed answer, with ``tool_choice: auto``."""
    with client.chat.completions.stream(**GIVEN, messages=messages) as stream:
        return stream.get_final_completion().choices[0].message


@pytest.mark.parametrize(("question", "expression"), [("What is 37 * 48?", "37 * 48"), ("Divide 7 by 0.", "7 / 0")])
def test_chat(client: openai.OpenAI, question: str, expression: str) -> None:
    """The model calls the calculator, and answers with its result, or says that it failed."""
    messages: list[Any] = [{"role": "user", "content": question}]
    message = ask(client, messages)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("calculator", {"expression": expression})
    result = calculator(expression)
    sent = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
    messages += [sent, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = ask(client, messages)
    assert not answer.tool_calls
    failed = result.removeprefix("error: ")
    assert answer.content == (f"{expression} = {result}." if failed == result else f"The calculator failed: {failed}.")


def test_no_call(client: openai.OpenAI) -> None:
    """A question that needs no tool gets the answer that it gets without tools."""
    messages: list[Any] = [{"role": "user", "content": "What is a radix cache?"}]
    message = ask(client, messages)
    assert not message.tool_calls
    plain = client.chat.completions.create(model="tutor", temperature=0, messages=messages).choices[0].message
    assert message.content == plain.content


def test_responses(client: openai.OpenAI) -> None:
    """The same turn in the Responses API."""
    tools: Any = [{"type": "function", **CALCULATOR["function"], "strict": False}]
    given: dict[str, Any] = {"model": "tutor", "temperature": 0, "max_output_tokens": 100, "tools": tools}
    asked: list[Any] = [{"role": "user", "content": "What is 37 * 48?"}]
    (call,) = client.responses.create(**given, input=asked, store=False).output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("calculator", {"expression": "37 * 48"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "1776"}
    turn: Any = [*asked, call.model_dump(exclude_none=True), result]
    assert client.responses.create(**given, input=turn, store=False).output_text == "37 * 48 = 1776."
