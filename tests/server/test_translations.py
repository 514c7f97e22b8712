"""Tools and reasoning of ``/v1/responses`` and ``/v1/messages``: bodies as chats, and parts of answers as events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from minisgl.core import Finished
from minisgl.plugins.http.apis import messages_request, responses_request
from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content, Part, Reasoning
from minisgl.plugins.http.apis.full_answer import FullChoice
from minisgl.plugins.http.apis.messages_events import Blocks, MessagesBuilder
from minisgl.plugins.http.apis.messages_request import MessagesRequest
from minisgl.plugins.http.apis.responses_events import Items, ResponsesBuilder
from minisgl.plugins.http.apis.responses_request import ResponsesRequest
from minisgl.plugins.http.apis.responses_store import ResponseStore
from minisgl.server.errors import ApiError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Bern and Rome?"},
    {"role": "assistant", "content": "I ask.", "reasoning_content": "Two calls.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    {"role": "tool", "tool_call_id": "call_2", "content": "Error: no such city"},
    {"role": "user", "content": "Hm."},
]
PARTS: list[Part] = [
    Reasoning("Two "),
    Reasoning("calls."),
    Content("I "),
    Content("ask."),
    CallBegin(0, "call_1", "weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, '"Bern"}'),
    CallBegin(1, "call_2", "weather"),
    CallArguments(1, '{"city":"Rome"}'),
]


def responses(**body: Any) -> ResponsesRequest:
    return msgspec.convert({"input": "x", **body}, ResponsesRequest)


def messages(**body: Any) -> MessagesRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **body}, MessagesRequest)


def test_a_conversation_of_items() -> None:
    items = [
        {"role": "user", "content": "Weather in Bern and Rome?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Two calls."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Bern"}'},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "Error: no such city"}],
        },
        {"role": "user", "content": "Hm."},
    ]
    tool = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA}
    body = responses(input=items, instructions="Be brief.", tools=[tool], tool_choice={"type": "function", "name": "x"})
    made = responses_request.translate(body)
    assert made.fields["messages"] == CHAT
    assert made.fields["tools"] == [TOOL]
    assert made.fields["tool_choice"] == {"type": "function", "function": {"name": "x"}}
    error = made.rename(ApiError(400, "messages[3]: the content is wrong.", "messages"))
    assert (error.message, error.param) == ("input[5]: the content is wrong.", "input[5]")


def test_a_conversation_of_blocks() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather in Bern and Rome?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two calls.", "signature": "x"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
                {"type": "tool_use", "id": "call_2", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "sun"},
                {"type": "tool_result", "tool_use_id": "call_2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "Hm."},
            ],
        },
    ]
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA, "cache_control": {}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    made = messages_request.translate(messages(messages=turns, system="Be brief.", tools=[tool], tool_choice=choice))
    assert made.fields["messages"] == CHAT
    assert made.fields["tools"] == [TOOL]
    assert (made.fields["tool_choice"], made.fields["parallel_tool_calls"]) == ("required", False)
    error = made.rename(ApiError(400, "messages[5]: the content is wrong.", "messages"))
    assert error.message == "messages[2]: the content is wrong."


@pytest.mark.parametrize("split", [1, 2, len(PARTS)])
def test_parts_become_items(split: int) -> None:
    """The items do not depend on how the parts arrive, and the events tell of the same items."""
    items, events = Items(sealed=True), []
    for start in range(0, len(PARTS), split):
        events += items.feed(PARTS[start : start + split])
    events += items.finish("completed")
    reasoning, message, *calls = items.items
    assert [item["type"] for item in items.items] == ["reasoning", "message", "function_call", "function_call"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Two calls."}]
    assert message["content"][0]["text"] == "I ask."
    assert [(call["call_id"], call["arguments"]) for call in calls] == [
        ("call_1", '{"city":"Bern"}'),
        ("call_2", '{"city":"Rome"}'),
    ]
    assert {item["status"] for item in items.items} == {"completed"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items.items
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)
    for i, item in enumerate(items.items):
        own = [event for event in events if event["output_index"] == i]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        deltas = "".join(event.get("delta", "") for event in own)
        assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        given = {event["item_id"] for event in own[1:-1]}
        assert given == {item["id"]}
    passed = responses_request.translate(
        responses(input=[{**reasoning, "content": None}, {"role": "user", "content": "x"}])
    )
    assert passed.fields["messages"][0]["reasoning_content"] == "Two calls."


def test_a_custom_call() -> None:
    """A custom tool is a function with one text, and its call has this text as its input."""
    body = responses(tools=[{"type": "custom", "name": "run", "description": "Runs code."}])
    (tool,) = responses_request.translate(body).fields["tools"]
    assert tool["function"]["parameters"]["required"] == ["input"]
    items = Items(body.custom_tools)
    items.feed([CallBegin(0, "c", "run"), CallArguments(0, '{"input": '), CallArguments(0, '"print(1)"}')])
    items.finish("completed")
    (call,) = items.items
    assert (call["type"], call["input"]) == ("custom_tool_call", "print(1)")
    again = responses_request.translate(responses(input=[call])).fields["messages"]
    assert json.loads(again[0]["tool_calls"][0]["function"]["arguments"]) == {"input": "print(1)"}


@pytest.mark.parametrize("split", [1, 2, len(PARTS)])
def test_parts_become_blocks(split: int) -> None:
    blocks, events = Blocks(), []
    for start in range(0, len(PARTS), split):
        events += blocks.feed(PARTS[start : start + split])
    events += blocks.close()
    assert blocks.blocks == [
        {"type": "thinking", "thinking": "Two calls.", "signature": "minisgl"},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
        {"type": "tool_use", "id": "call_2", "name": "weather", "input": {"city": "Rome"}},
    ]
    for i in range(4):
        own = [event["type"] for event in events if event["index"] == i]
        assert own == ["content_block_start", *["content_block_delta"] * (len(own) - 2), "content_block_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"city":"Bern"}{"city":"Rome"}'


def test_an_answer_that_ends_in_calls() -> None:
    choice = FullChoice(0, parts=PARTS, has_calls=True, finish=Finished(0, "stop", prompt_tokens=9, cached_tokens=4))
    message = MessagesBuilder("m", "id", 9, lambda error: error).full([choice])
    assert (message["stop_reason"], message["usage"]["input_tokens"]) == ("tool_use", 5)
    response = ResponsesBuilder("m", responses(), {}, lambda error: error).full([choice])
    assert (response["status"], len(response["output"])) == ("completed", 4)


def test_arguments_that_are_cut() -> None:
    """The text of arguments that are no JSON is not lost."""
    blocks = Blocks()
    blocks.feed([CallBegin(0, "c", "weather"), CallArguments(0, '{"city": "Be')])
    blocks.close()
    assert blocks.blocks[0]["input"] == {"invalid_json": '{"city": "Be'}


def test_a_failed_stream() -> None:
    builder = ResponsesBuilder("m", responses(), {}, lambda error: error)
    (event,) = builder.error(ApiError(500, "broken"))["events"]
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "server_error", "message": "broken"}
    failed = MessagesBuilder("m", "id", 9, lambda error: error).error(ApiError(503, "full"))
    assert failed["events"][0]["error"] == {"type": "overloaded_error", "message": "full"}


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_responses=3, max_bytes=1010)
    for i in range(3):
        store.add({"id": f"r{i}", "output": []}, [])
    store.get("r0")
    store.add({"id": "r3", "output": []}, [])
    assert store.get("r0") and store.get("r3")
    with pytest.raises(ApiError, match="r1"):
        store.get("r1")
    store.add({"id": "large", "output": ["x" * 900]}, [])
    with pytest.raises(ApiError, match="large"):  # its items and its output are twice this size
        store.get("large")
    store.add({"id": "half", "output": ["x" * 470]}, [])
    with pytest.raises(ApiError, match="r0"):
        store.get("r0")
    store.remove("half")
    with pytest.raises(ApiError, match="half"):
        store.get("half")
