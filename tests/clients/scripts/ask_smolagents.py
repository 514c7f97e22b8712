"""The package ``smolagents``."""

from typing import Any

from cases import KEY, MODEL, QUESTION, URL, Person, called, case, run
from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool
from smolagents.models import agglomerate_stream_deltas

model = OpenAIModel(MODEL, api_base=URL, api_key=KEY, temperature=0, max_tokens=100)


class Add(Tool):
    name = "add"
    description = "Add two numbers."
    inputs = {
        "a": {"type": "integer", "description": "a", "enum": [1, 2]},
        "b": {"type": "integer", "description": "b", "enum": [3, 4]},
    }
    output_type = "integer"

    def forward(self, a: int, b: int) -> int:
        return a + b


MESSAGES = [ChatMessage(MessageRole.USER, [{"type": "text", "text": QUESTION}])]


@case
def chat() -> Any:
    return model.generate(MESSAGES).content


@case
def stream() -> Any:
    return [delta.content or "" for delta in model.generate_stream(MESSAGES)]


@case
def schema() -> Any:
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    return Person.model_validate_json(model.generate(MESSAGES, response_format=format_).content).model_dump()


@case
def tools() -> Any:
    (call,) = model.generate(MESSAGES, tools_to_call_from=[Add()], parallel_tool_calls=False).tool_calls
    return called(call.function.name, call.function.arguments)


@case
def streamed_tools() -> Any:
    deltas = list(model.generate_stream(MESSAGES, tools_to_call_from=[Add()], parallel_tool_calls=False))
    (call,) = agglomerate_stream_deltas(deltas).tool_calls
    return called(call.function.name, call.function.arguments)


run()
