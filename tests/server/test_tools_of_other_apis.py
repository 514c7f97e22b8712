"""A turn of an agent through ``/v1/responses`` and ``/v1/messages``: a forced call, its result, counted tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from minisgl.models.resolve import resolve_model
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_tools_of_other_apis")  # one process: the server starts once
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- set call = call.function %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
SCHEMA: Any = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ASK = "Add two numbers."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tutor``, with a chat template that writes tools."""
    path = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(resolve_model("tutor"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with Server("device=cpu", f"model={path}", "server.served_model_name=m", "num_pages=512") as running:
        yield running


def test_responses(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    given: dict[str, Any] = {
        "model": "m",
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
        "temperature": 0,
        "max_output_tokens": 120,
    }
    response: Any = client.responses.create(**given, input=ASK, tool_choice="required")
    assert response.status == "completed"
    call = response.output[-1]
    assert (call.type, call.name, sorted(json.loads(call.arguments))) == ("function_call", "add", ["a", "b"])
    with client.responses.stream(**given, input=ASK, tool_choice={"type": "function", "name": "add"}) as stream:
        events: list[Any] = list(stream)
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert deltas == done.arguments and sorted(json.loads(deltas)) == ["a", "b"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    items: Any = [{"role": "user", "content": ASK}, call.model_dump(exclude_none=True), result]
    assert client.responses.create(**given, input=items, tool_choice="none").output_text


def test_messages(server: Server) -> None:
    def post(path: str = "", **fields: Any) -> Any:
        tool = {"name": "add", "input_schema": SCHEMA}
        body = {"model": "m", "tools": [tool], "messages": [{"role": "user", "content": ASK}], **fields}
        limit = {} if path else {"max_tokens": 120, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/messages{path}", json={**body, **limit}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer

    message = post(tool_choice={"type": "any"}).json()
    call = message["content"][-1]
    assert (message["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "add")
    assert sorted(call["input"]) == ["a", "b"]
    stream = post(tool_choice={"type": "tool", "name": "add"}, stream=True).text
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    text = "".join(event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta")
    assert sorted(json.loads(text)) == ["a", "b"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "7"}]}
    turns = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    last = post(messages=turns, tool_choice={"type": "none"}).json()
    assert last["content"][0]["type"] == "text"
    counted = post("/count_tokens").json()["input_tokens"]
    usage = message["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
