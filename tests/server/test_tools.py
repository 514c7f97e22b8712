"""Tools and reasoning over HTTP, with the openai client: forced calls, calls that a model writes, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from tokenizers import AddedToken

from minisgl.models.resolve import resolve_model
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_tools")  # one process: the servers start once
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}{{- message.content.lstrip('\n') }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if thinking is defined and not thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- elif thinking is defined %}{{- '<think>\n' }}{%- endif %}{%- endif %}"""
USER: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city, not <|im_end|>.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
        "strict": True,
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
            "required": ["a", "b"],
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {"model": "m", "messages": USER, "max_tokens": 150, "tools": [WEATHER, ADD, NOW]}


def serve(folder: Path, *more: str) -> Server:
    return Server(
        "device=cpu", "server.port=0", f"model={folder}", "server.served_model_name=m", "num_pages=512", *more
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tutor``, with a chat template that writes tools."""
    path = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(resolve_model("tutor"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder) as running:
        yield running


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Random weights, and a tokenizer that has ``<think>`` and ``</think>``."""
    path = tiny_checkpoint("qwen3", tmp_path_factory.mktemp("thinker"), tokenizer=True, vocab_size=512)
    raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    assert raw.get_vocab_size() <= 512
    raw.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with serve(path) as running:
        running.think_ids = [raw.token_to_id("<think>"), raw.token_to_id("</think>")]  # type: ignore[attr-defined]
        yield running


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def check_call(call: Any) -> None:
    """Assert that a call's arguments follow the schema of its tool."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"}
        assert len(arguments["city"]) <= 8
        assert arguments["unit"] in ("C", "F")
    elif call.function.name == "add":
        assert set(arguments) == {"a", "b"}
        assert all(0 <= value <= 99 for value in arguments.values())
    else:
        assert (call.function.name, arguments) == ("now", {})


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_required(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        **ASK, tool_choice="required", parallel_tool_calls=False, temperature=temperature, n=3, seed=1
    )
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.id.startswith("call_")
        check_call(call)
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len({call.id for call in calls}) == 3


def test_named(client: openai.OpenAI) -> None:
    for name in ("add", "now", "get_weather"):
        choice: Any = {"type": "function", "function": {"name": name}}
        answer = client.chat.completions.create(**ASK, tool_choice=choice, temperature=1.0, seed=2)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.name == name  # type: ignore[union-attr]
        check_call(call)


def test_allowed_tools(client: openai.OpenAI) -> None:
    """A model may only call the allowed tools."""
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    }
    answer = client.chat.completions.create(**ASK, tool_choice=allowed, parallel_tool_calls=False, temperature=2.0, n=4)
    for choice in answer.choices:
        assert [call.function.name for call in choice.message.tool_calls or []] == ["add"]  # type: ignore[union-attr]


def test_streamed(client: openai.OpenAI) -> None:
    """The deltas of the stream add up to the answer that is not streamed, with stop strings and log-probabilities."""
    fields: dict[str, Any] = {**ASK, "tools": [WEATHER], "tool_choice": "required", "temperature": 0.0}
    fields["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**fields).choices[0].message
    for more in ({}, {"stop": ["</tool_call>", "never"]}, {"logprobs": True}):
        calls: dict[int, list[Any]] = {}
        finish, logprobs = None, 0
        for chunk in client.chat.completions.create(**fields, **more, stream=True):
            (choice,) = chunk.choices
            assert not choice.delta.content
            for each in choice.delta.tool_calls or []:
                calls.setdefault(each.index, []).append(each)
            finish = choice.finish_reason or finish
            logprobs += len((choice.logprobs and choice.logprobs.content) or [])
        assert finish == "tool_calls"
        assert list(calls) == [0]
        first, *rest = calls[0]
        assert first.id.startswith("call_")
        assert first.type == "function"
        assert first.function.name == whole.tool_calls[0].function.name  # type: ignore[index, union-attr]
        assert len(rest) > 2, "the arguments stream"
        assert all(each.id is None and each.function.name is None for each in rest)
        arguments = "".join(each.function.arguments for each in calls[0])
        assert arguments == whole.tool_calls[0].function.arguments  # type: ignore[index, union-attr]
        assert (logprobs > 10) == ("logprobs" in more)


def test_the_clients_accumulator(client: openai.OpenAI) -> None:
    """The openai client's own stream helper sees the call as it is parsed."""
    with client.chat.completions.stream(**ASK, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    check_call((final.choices[0].message.tool_calls or [])[0])


def test_calls_cut_by_the_limit(client: openai.OpenAI) -> None:
    """The beginning of a call is streamed as far as it goes, and the finish reason is ``length``."""
    ask = {**ASK, "tools": [WEATHER], "parallel_tool_calls": False}
    whole = client.chat.completions.create(**ask, tool_choice="required", temperature=0.0).choices[0]
    full = (whole.message.tool_calls or [])[0].function  # type: ignore[union-attr]
    seen = set()
    for limit in range(12, 120, 4):
        fields = {**ask, "max_tokens": limit}
        cut = client.chat.completions.create(**fields, tool_choice="required", temperature=0.0).choices[0]
        if cut.finish_reason == "tool_calls":
            break
        assert cut.finish_reason == "length"
        for call in cut.message.tool_calls or []:
            assert full.arguments.startswith(call.function.arguments)  # type: ignore[union-attr]
            seen.add(call.function.arguments)  # type: ignore[union-attr]
    assert len(seen) > 2


def test_several_calls(client: openai.OpenAI) -> None:
    """Without ``parallel_tool_calls: false``, an answer may have several calls."""
    answer = client.chat.completions.create(
        **{**ASK, "tools": [NOW]}, tool_choice="required", temperature=1.0, n=8, seed=3,
        logit_bias={"198": 3.0},
    )  # fmt: skip
    counts = []
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        counts.append(len(calls))
        assert all(call.function.name == "now" for call in calls)  # type: ignore[union-attr]
    assert min(counts) >= 1


def test_auto_and_none_write_text(client: openai.OpenAI, server: Server) -> None:
    """``tutor`` calls nothing by itself. With ``none``, it does not see the tools."""
    plain = {"model": "m", "messages": USER, "max_tokens": 20, "temperature": 0.0}
    alone = client.chat.completions.create(**plain)  # type: ignore[call-overload]
    none = client.chat.completions.create(**plain, tools=[WEATHER], tool_choice="none")  # type: ignore[call-overload]
    auto = client.chat.completions.create(**plain, tools=[WEATHER])  # type: ignore[call-overload]
    assert none.choices[0].message.content == alone.choices[0].message.content
    assert none.usage.prompt_tokens == alone.usage.prompt_tokens < auto.usage.prompt_tokens
    for answer in (none, auto):
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason != "tool_calls"


def test_json_beside_tools(client: openai.OpenAI) -> None:
    """With ``auto``, an answer that must be JSON is this JSON or a call."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    given: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        **ASK, response_format=given, parallel_tool_calls=False, temperature=2.0, n=12, seed=5
    )
    for choice in answer.choices:
        if choice.message.tool_calls:
            check_call(choice.message.tool_calls[0])
        else:
            assert isinstance(json.loads(choice.message.content or "")["ok"], bool)


def test_a_forced_call_ignores_the_format_of_texts(client: openai.OpenAI) -> None:
    """A format is one of the text, and a forced call has none: instructor sends both."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    message = client.chat.completions.create(**ASK, tool_choice="required", response_format=form).choices[0].message
    check_call((message.tool_calls or [])[0])


def test_an_agents_turn(client: openai.OpenAI) -> None:
    """The message of an answer goes back as it came, with the result of the tool."""
    fields: dict[str, Any] = {**ASK, "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**fields).choices[0].message
    result = {"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "18 C"}
    turn: Any = {**ASK, "messages": [*USER, message.model_dump(exclude_none=True), result], "max_tokens": 10}
    assert client.chat.completions.create(**turn).choices[0].finish_reason in ("stop", "length")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"tools": [{"type": "web_search"}]}, "tools"),
    "no function": ({"tools": [{"type": "function"}]}, "tools"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    "a long name": ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools"),
    "a name with a space": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    "no schema": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    "two of one name": ({"tools": [NOW, NOW]}, "tools"),
    "too many": ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]}, "tools"),
    "a tool is a text": ({"tools": ["now"]}, "tools"),
    "deep": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": json.loads(
        '{"a":' * 70 + "{}" + "}" * 70)}}]}, "tools"),
    "required without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "an unknown choice": ({"tool_choice": "sometimes"}, "tool_choice"),
    "an unknown function": ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    "an unknown allowed tool": ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}}, "tool_choice"),
    "a forced schema that no grammar knows": ({"tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}}],
        "tool_choice": "required"}, "tools"),
    "two forms at once": ({"tool_choice": "required", "guided_regex": "a+"}, "tool_choice"),
    "a regex beside tools": ({"guided_regex": "a+"}, "guided_regex"),
    "functions": ({"tools": None, "functions": [NOW["function"]]}, "functions"),
    "function_call": ({"tools": None, "function_call": {"name": "now"}}, "function_call"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_by_name(server: Server, name: str) -> None:
    fields, param = BAD[name]
    for stream in (False, True):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**ASK, **fields, "stream": stream}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text


def test_a_template_without_tools_is_refused(folder: Path, tmp_path: Path) -> None:
    """A parser alone does not help: the model would not see the tools."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with serve(tmp_path / "model", "tool_parser=hermes") as running:
        url = f"{running.url}/v1/chat/completions"
        for choice in ("auto", "required"):
            body = {**ASK, "tool_choice": choice}
            answer = httpx.post(url, json=body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
        assert httpx.post(url, json={**body, "tool_choice": "none", "max_tokens": 1}, timeout=60).status_code == 200


# ---- reasoning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_begins_after_the_reasoning(thinker: Server, stream: bool) -> None:
    """With a prompt that opens the reasoning, the model thinks freely, and what follows is JSON or a call."""
    end = thinker.think_ids[1]  # type: ignore[attr-defined]
    fields: Any = {
        "model": "m", "messages": USER, "max_tokens": 160, "temperature": 1.0, "logit_bias": {str(end): 4.0},
        "extra_body": {"chat_template_kwargs": {"thinking": True}},
    }  # fmt: skip
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    given: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    client, thoughts = client_of(thinker), 0
    for seed in range(4):
        for more in (
            {"response_format": given},
            {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False},
        ):
            reasoning, content, arguments, finish = "", "", "", None
            answer = client.chat.completions.create(**fields, **more, seed=seed, stream=stream)
            for part in answer if stream else [answer]:  # type: ignore[list-item]
                choice = part.choices[0]
                message = choice.delta if stream else choice.message
                reasoning += getattr(message, "reasoning", None) or ""
                assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
                content += message.content or ""
                arguments += "".join(call.function.arguments for call in message.tool_calls or [])
                finish = choice.finish_reason
            thoughts += len(reasoning)
            assert "</think>" not in reasoning + content
            if "tools" in more:
                assert finish == "tool_calls"
                assert set(json.loads(arguments)) == {"a", "b"}
            else:
                assert finish == "stop"
                assert isinstance(json.loads(content)["ok"], bool)
    assert thoughts > 0


def test_a_grammar_without_reasoning(thinker: Server) -> None:
    """Where the prompt ends the reasoning, or does not open it, an answer may begin with JSON."""
    client = client_of(thinker)
    begin, end = thinker.think_ids  # type: ignore[attr-defined]
    fields: Any = {"model": "m", "messages": USER, "max_tokens": 200, "temperature": 1.0}
    for variables in ({}, {"thinking": False}):
        answer = client.chat.completions.create(
            **fields, n=4, seed=1, logit_bias={str(begin): -100}, response_format={"type": "json_object"},
            extra_body={"chat_template_kwargs": variables},
        )  # fmt: skip
        assert all((choice.message.content or "").startswith("{") for choice in answer.choices)
    thought = client.chat.completions.create(
        **fields, n=4, seed=1, logit_bias={str(begin): 100, str(end): 4}, response_format={"type": "json_object"}
    )
    for choice in thought.choices:
        assert choice.message.reasoning  # type: ignore[attr-defined]
        assert (choice.message.content or "{").startswith("{")


def test_a_continued_message_and_its_reasoning(thinker: Server) -> None:
    """A message that ends within its reasoning goes on with it. Otherwise the answer has none, and JSON goes on."""
    client = client_of(thinker)

    def ask(begun: str) -> Any:
        messages: Any = [*USER, {"role": "assistant", "content": begun}]
        extra = {"add_generation_prompt": False, "continue_final_message": True}
        answer = client.chat.completions.create(
            model="m", messages=messages, max_tokens=300, temperature=1.0, seed=2, extra_body=extra,
            logit_bias={str(thinker.think_ids[1]): 6},  # type: ignore[attr-defined]
            response_format={"type": "json_object"},
        )  # fmt: skip
        return answer.choices[0].message

    thinks = ask("<think>\nWell,")
    assert thinks.reasoning
    assert (thinks.content or "{").startswith("{")
    for begun in ('{"a": ', '<think>\nWell.\n</think>\n\n{"a": '):
        message = ask(begun)
        assert not hasattr(message, "reasoning")
        assert message.content[0] in '{["tfn-0123456789'


def test_a_continued_message_beside_tools(server: Server) -> None:
    messages = [*USER, {"role": "assistant", "content": "Let me"}]
    body = {**ASK, "messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    url = f"{server.url}/v1/chat/completions"
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    forced = httpx.post(url, json={**body, "tool_choice": "required"}, timeout=60)
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice")


def test_a_grammar_needs_the_token_that_ends_the_reasoning(folder: Path) -> None:
    """``tutor`` has no token ``</think>``, so no grammar can begin after its reasoning."""
    with serve(folder) as running:
        body = {**ASK, "chat_template_kwargs": {"thinking": True}, "tool_choice": "required"}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
        assert "</think>" in answer.json()["error"]["message"]
