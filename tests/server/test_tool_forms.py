"""Forced calls in the forms of Qwen3-Coder and Mistral, with both plugins of grammars, on weights that know neither."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import AddedToken

from minisgl.models.resolve import resolve_model
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_tool_forms")  # one process: the servers start once
CODER = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<tool_call>\n<function=f>\n<parameter=p>\nx\n</parameter>\n</function>\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
MISTRAL = """{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}{{- '[INST]' + message.content + '[/INST]' }}
{%- for call in message.tool_calls or [] %}{{- CALL }}{%- endfor %}{%- endfor %}"""
NAMED = "'[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson"
LISTED = "'[TOOL_CALLS] [' + call.function | tojson + ']'"
USER = [{"role": "user", "content": "How is the weather?"}]
CITY = {"type": "string", "maxLength": 6}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": CITY,
                "days": {"$ref": "#/$defs/days"},
                "unit": {"enum": ["C", "F"]},
                "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 2},
                "note": {"anyOf": [CITY, {"type": "null"}]},
            },
            "required": ["city", "days", "unit"],
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}


def ask(server: Server, **fields: Any) -> httpx.Response:
    body = {
        "messages": USER,
        "max_tokens": 300,
        "temperature": 1.0,
        "tools": [TOOL],
        "tool_choice": "required",
        **fields,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def check_calls(answer: httpx.Response) -> None:
    """Check that each choice is one call, whose arguments follow the schema."""
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None), choice
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "get_weather"
        assert {"city", "days", "unit"} <= arguments.keys() <= {"city", "days", "unit", "hours", "note"}
        assert isinstance(arguments["city"], str)
        assert len(arguments["city"]) <= 6
        assert arguments["days"] in range(1, 10)
        assert arguments["unit"] in ("C", "F")
        assert all(hour in range(24) for hour in arguments.get("hours", []))
        assert isinstance(arguments.get("note"), str | None)


@pytest.fixture(scope="module", params=["llguidance", "plain"])
def coder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("coder") / "model"
    shutil.copytree(resolve_model("tutor"), path)
    (path / "chat_template.jinja").write_text(CODER)
    with Server(f"model={path}", f"grammar={request.param}", "num_pages=512") as running:
        yield running


def test_qwen3_coder(coder: Server) -> None:
    check_calls(ask(coder, n=4, seed=1, parallel_tool_calls=False))
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    lines = ask(coder, tool_choice=chosen, stream=True, seed=2).text.split("\n\n")
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines if "{" in line]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert sorted(json.loads(arguments)) >= ["city", "days", "unit"]
    assert pieces[0]["function"]["name"] == "get_weather"
    assert len(pieces) > 3


@pytest.mark.parametrize("schema", [{"type": "string", "pattern": "a+"}, {"type": "string", "format": "date"}])
def test_what_its_form_can_not_have(coder: Server, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    refused = ask(coder, tools=[tool])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert ask(coder, tools=[tool], tool_choice="auto", max_tokens=2).status_code == 200


def mistral_folder(path: Path, call: str) -> Path:
    """Write random weights with a tokenizer that has Mistral's special tokens."""
    tiny_checkpoint("qwen3", path, tokenizer=True, vocab_size=512, max_position_embeddings=4096)
    raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.add_tokens([AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]")])
    raw.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(MISTRAL.replace("CALL", call))
    return path


@pytest.mark.parametrize("grammar", ["llguidance", "plain"])
@pytest.mark.parametrize("call", [LISTED, NAMED], ids=["list", "names"])
def test_mistral(tmp_path: Path, call: str, grammar: str) -> None:
    """The first token of the answer is that of the mark, and the client does not see it."""
    path = mistral_folder(tmp_path / "model", call)
    mark = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("[TOOL_CALLS]")
    with Server(f"model={path}", f"grammar={grammar}", "num_pages=512") as server:
        answer = ask(server, return_token_ids=True, seed=3, n=4, max_tokens=1500, parallel_tool_calls=False)
        check_calls(answer)
        assert all(choice["token_ids"][0] == mark for choice in answer.json()["choices"])
