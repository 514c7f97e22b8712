"""``POST /v1/responses`` with the openai client: full and streamed, refused by name, stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once
ASK = "What is a page?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("device=cpu", "model=tutor", "num_pages=512", "server.responses_store=memory") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> str:
    answer = client.chat.completions.create(model="tutor", messages=messages, temperature=0, **fields)
    return answer.choices[0].message.content or ""


def test_text_equals_a_chat(client: openai.OpenAI) -> None:
    said = chat(client, [{"role": "user", "content": ASK}], max_tokens=100)
    response = client.responses.create(model="tutor", input=ASK, temperature=0, max_output_tokens=100)
    assert response.output_text == said != ""
    assert response.status == "completed" and response.incomplete_details is None
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.temperature, response.top_p) == (0, 1.0)


def test_limit_of_the_output(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tutor", input=ASK, temperature=0, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 3


def test_items_are_a_conversation(client: openai.OpenAI) -> None:
    """Texts in each form become the messages of a chat."""
    system: dict[str, Any] = {"role": "system", "content": "Answer in one sentence."}
    turns = [system, {"role": "user", "content": ASK}, {"role": "assistant", "content": "A piece."}]
    said = chat(client, [*turns, {"role": "user", "content": "Why?"}], max_tokens=20)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A piece."}]},
        {"type": "message", "role": "user", "content": "Why?"},
    ]
    response = client.responses.create(
        model="tutor", input=items, instructions="Answer in one sentence.", temperature=0, max_output_tokens=20
    )
    assert response.output_text == said


def test_stream_has_all_events_in_order(client: openai.OpenAI) -> None:
    full = client.responses.create(model="tutor", input=ASK, temperature=0, max_output_tokens=20)
    with client.responses.stream(model="tutor", input=ASK, temperature=0, max_output_tokens=20) as stream:
        events: list[Any] = list(stream)
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == full.output_text
    assert events[-1].response.output[0].content[0].text == full.output_text
    assert events[-1].response.usage == full.usage.model_copy(
        update={"input_tokens_details": events[-1].response.usage.input_tokens_details}
    )


def test_parse(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=9)

    parsed = client.responses.parse(model="tutor", input="Describe a person.", text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


def test_logprobs(client: openai.OpenAI) -> None:
    response: Any = client.responses.create(
        model="tutor", input=ASK, temperature=0, max_output_tokens=4, top_logprobs=2,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == response.output_text
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * 4


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        (
            {"tools": [{"type": "function", "name": "now"}, {"type": "web_search"}], "tool_choice": "required"},
            "tools[1].type",
            "web_search",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": []}]}, "tools[0].type", "namespace"),
        ({"background": True}, "background", "background"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"include": ["nonsense"]}, "include[0]", "nonsense"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format", "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": "hot"}, "temperature", "temperature"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content", "content"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].arguments", "missing"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content", "this server"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "poet", "content": "y"}]}, "input[1]", "input[1]"),
    ],
)
def test_refused_by_name(server: Server, fields: dict[str, Any], param: str, word: str) -> None:
    for stream in (False, True):
        answer = httpx.post(f"{server.url}/v1/responses", json={"input": ASK, "stream": stream, **fields}, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert word in error["message"]


def test_a_long_prompt_is_refused(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "word " * 20_000}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "input"


def test_stored_responses(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(model="tutor", input=ASK, temperature=0, max_output_tokens=20)
    assert first.store is True  # type: ignore[attr-defined]
    again = client.responses.create(
        model="tutor", input="Why?", previous_response_id=first.id, temperature=0, max_output_tokens=20
    )
    turns: list[Any] = [{"role": "user", "content": ASK}, {"role": "assistant", "content": first.output_text}]
    assert again.output_text == chat(client, [*turns, {"role": "user", "content": "Why?"}], max_tokens=20)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items: list[Any] = client.responses.input_items.list(again.id).data
    assert [item.content[0].text for item in items] == ["Why?", first.output_text, ASK]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model="tutor", input="Why?", previous_response_id=first.id)
    unstored = client.responses.create(model="tutor", input=ASK, max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with client.responses.stream(model="tutor", input=ASK, temperature=0, max_output_tokens=100) as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text != ""


def test_nothing_is_stored_by_default(tutor: Server) -> None:
    client = openai.OpenAI(base_url=f"{tutor.url}/v1", api_key="none", max_retries=0)
    response: Any = client.responses.create(model="tutor", input=ASK, max_output_tokens=2)
    assert response.store is False
    fields: list[dict[str, Any]] = [{"store": True}, {"previous_response_id": response.id}]
    for given in fields:
        with pytest.raises(openai.BadRequestError, match=r"server\.responses_store=memory"):
            client.responses.create(model="tutor", input=ASK, **given)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
