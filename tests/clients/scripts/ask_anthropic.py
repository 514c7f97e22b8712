"""The package ``anthropic``."""

from typing import Any

import anthropic
from cases import ADD, CALCULATOR, KEY, MODEL, RESULT, TO_CALCULATE, URL, USER, called, case, run

client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
TOOL: Any = {
    "name": "add", "description": "Add two numbers.", "input_schema": ADD["function"]["parameters"]
}  # fmt: skip
GREEDY = {"temperature": 0}  # the package has no such parameter any more
FORCED: dict[str, Any] = {
    "model": MODEL, "max_tokens": 100, "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}  # fmt: skip


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def call_of(message: Any) -> Any:
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    return call


@case
def chat() -> Any:
    return text_of(client.messages.create(model=MODEL, max_tokens=200, messages=USER, extra_body=GREEDY))


@case
def stream() -> Any:
    with client.messages.stream(model=MODEL, max_tokens=200, messages=USER, extra_body=GREEDY) as stream:
        return list(stream.text_stream)


@case
def tools() -> Any:
    call = call_of(client.messages.create(**FORCED, messages=USER))
    return called(call.name, call.input)


@case
def streamed_tools() -> Any:
    with client.messages.stream(**FORCED, messages=USER) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        call = call_of(stream.get_final_message())
    assert len(pieces) > 1
    return called(call.name, "".join(pieces))


@case
def agent() -> Any:
    """Call a tool, send its result back, and get an answer."""
    first = client.messages.create(**FORCED, messages=USER)
    call = call_of(first)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    messages: Any = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    given: Any = {"model": MODEL, "max_tokens": 100, "tools": [TOOL], "tool_choice": {"type": "none"}}
    second = client.messages.create(**given, messages=messages)
    return {"call": called(call.name, call.input), "text": text_of(second)}


@case
def streamed_agent() -> Any:
    """Leave it to the model to call a tool and to use its result, with both answers streamed."""
    function = CALCULATOR["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    given: Any = {"model": MODEL, "max_tokens": 100, "tools": [tool], "extra_body": GREEDY}
    asked: list[Any] = [{"role": "user", "content": TO_CALCULATE}]
    with client.messages.stream(**given, messages=asked) as stream:
        first = stream.get_final_message()
    call = call_of(first)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    sent: Any = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(**given, messages=[*asked, *sent]) as stream:
        text = "".join(stream.text_stream)
    return {"call": called(call.name, call.input), "text": text}


@case
def counted() -> Any:
    count = client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=USER).usage
    return [count, usage.input_tokens + (usage.cache_read_input_tokens or 0)]


run()
