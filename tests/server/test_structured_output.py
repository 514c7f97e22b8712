"""Structured output over HTTP, with the openai client: the names of OpenAI, vLLM and SGLang, streamed and not."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once
USER: list[Any] = [{"role": "user", "content": "Describe a person as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
}


def content(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(model="tutor", messages=USER, max_tokens=100, seed=1, **fields)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def is_person(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "age"] and len(value["name"]) <= 8 and 0 <= value["age"] <= 9


def test_json_schema(client: openai.OpenAI) -> None:
    given: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for temperature in (0.0, 1.0, 2.0):
        assert is_person(content(client, temperature=temperature, response_format=given))


def test_parse_into_a_pydantic_model(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=9)

    parsed = client.chat.completions.parse(model="tutor", messages=USER, max_tokens=100, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_streamed(client: openai.OpenAI) -> None:
    given: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    stream = client.chat.completions.create(
        model="tutor", messages=USER, max_tokens=100, temperature=1.0, response_format=given, stream=True
    )
    assert is_person("".join(chunk.choices[0].delta.content or "" for chunk in stream))


def test_several_choices_and_rows_without_a_grammar(client: openai.OpenAI) -> None:
    """Each choice follows the grammar on its own, and a request without one beside them answers as alone."""
    plain: Any = {"model": "tutor", "messages": USER, "temperature": 0.0, "max_tokens": 30}
    alone = client.chat.completions.create(**plain).choices[0].message.content
    given: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    several = client.chat.completions.create(
        model="tutor", messages=USER, max_tokens=100, temperature=1.0, n=4, response_format=given
    )
    assert all(is_person(choice.message.content or "") for choice in several.choices)
    assert len({choice.message.content for choice in several.choices}) > 1
    assert client.chat.completions.create(**plain).choices[0].message.content == alone


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_json": SCHEMA}, r"\{.*\}"),
        ({"guided_json": json.dumps(SCHEMA)}, r"\{.*\}"),
        ({"guided_grammar": 'start: "a" | "b" "c"'}, "a|bc"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{2}", "json": None}}, "[a-c]{2}"),
        ({"structured_outputs": {"json": SCHEMA}}, r"\{.*\}"),
        ({"structured_outputs": {"grammar": 'start: ("x" | "z") "y"'}}, "[xz]y"),
        ({"regex": "(ab)+c"}, "(ab)+c"),
        ({"ebnf": 'start: "ok"'}, "ok"),
        ({"json_schema": json.dumps(SCHEMA)}, r"\{.*\}"),
    ],
)
def test_names_of_other_servers(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(client, extra_body=fields))


def test_plain_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tutor", prompt="Is it?", max_tokens=20, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].text in ("yes", "no")


def test_text_asks_for_nothing(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tutor", "messages": USER, "temperature": 0.0, "max_tokens": 20}
    expected = client.chat.completions.create(**fields).choices[0].message.content
    same = client.chat.completions.create(**fields, response_format={"type": "text"}).choices[0].message.content
    assert same == expected


def test_json_that_is_cut_says_so(client: openai.OpenAI) -> None:
    """An answer that ends before its grammar does has another finish reason than ``stop``."""
    answer = client.chat.completions.create(
        model="tutor", messages=USER, max_tokens=3, extra_body={"guided_json": SCHEMA}
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"grammar": {"kind": "xml", "text": ""}}, "grammar"),
        ({"guided_choice": ['"' * 1000] * 31}, "guided_choice"),  # larger when its quotes are escaped
        ({"guided_json": {"enum": ["é" * 1000] * 31}}, "guided_json"),
        ({"guided_json": "[" * 50_000}, "guided_json"),
        ({"guided_json": {"type": "string", "x": [1] * 40_000}}, "guided_json"),
    ],
)
def test_refused_by_name(tutor: Server, fields: dict[str, Any], named: str) -> None:
    """With a 400 that names the parameter that the client sent; the server keeps serving."""
    body = {"model": "tutor", "messages": USER, "max_tokens": 5, **fields}
    answer = httpx.post(f"{tutor.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_cuts_json_is_reported(tutor: Server, stream: bool) -> None:
    """``finish_reason`` is "stop", as for a whole answer, and vLLM's ``stop_reason`` says which string cut it."""
    body = {"model": "tutor", "messages": USER, "max_tokens": 60, "guided_json": SCHEMA, "stream": stream}

    def last_choice(**fields: Any) -> tuple[dict[str, Any], str]:
        answer = httpx.post(f"{tutor.url}/v1/chat/completions", json={**body, **fields}, timeout=60)
        if not stream:
            choice = answer.json()["choices"][0]
            return choice, choice["message"]["content"]
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        return choices[-1], "".join(choice["delta"].get("content") or "" for choice in choices)

    choice, text = last_choice(stop=['"age"'])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"age"')
    assert text.startswith('{"name": "') and '"age"' not in text
    choice, text = last_choice()
    assert choice["finish_reason"] == "stop" and choice.get("stop_reason") is None
    assert is_person(text)


def test_logit_bias_can_not_break_a_grammar(client: openai.OpenAI, tutor: Server) -> None:
    """A bias that asks for other tokens has no effect on what is allowed, and one that forbids may be overruled."""
    ids = httpx.post(f"{tutor.url}/tokenize", json={"prompt": "zebra no", "add_special_tokens": False}).json()["tokens"]
    wanted: dict[str, Any] = {str(token): 100 for token in ids}
    forbidden: dict[str, Any] = {str(token): -100 for token in range(1000)}
    for bias in (wanted, forbidden):
        for temperature in (0.0, 1.0):
            one: Any = {"guided_choice": ["yes"]}
            assert content(client, logit_bias=bias, temperature=temperature, extra_body=one) == "yes"
