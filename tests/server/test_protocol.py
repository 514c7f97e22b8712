"""Parsing of request bodies: supported parameters, refused parameters, and the manual's list of parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.core import SamplingParams
from minisgl.message import TextPrompt, TokensPrompt, pack_ids
from minisgl.plugins.http.apis.completion import CompletionRequest
from minisgl.plugins.http.apis.parameters import FIELD_ROLES, FullChatRequest
from minisgl.plugins.http.compatible import HINTS, REFUSED
from minisgl.plugins.http.tokenize import DetokenizeBody, TokenizeBody
from minisgl.server.errors import ApiError
from minisgl.server.protocol import ChatRequest

from .conftest import parse

MANUAL = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> FullChatRequest:
    messages = [{"role": "user", "content": "x"}]
    return parse(json.dumps({"messages": messages, **fields}).encode(), FullChatRequest)


def test_annotations_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the annotations of a struct takes longer than all other work for a body."""
    completion()
    chat()
    monkeypatch.setattr(msgspec._utils, "get_class_annotations", None)
    assert completion(max_tokens=3).max_tokens == 3
    assert chat(n=2).n == 2


def test_all_sampling_parameters_are_passed_on() -> None:
    """Every sampling parameter of a request body is found in `SamplingParams`."""
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "n": 2,
        "seed": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"9": 1.5},
        "skip_special_tokens": False,
        "prompt_logprobs": 4,
        "cache_salt": "mine",
        "priority": -3,
        "min_tokens": 2,
        "bad_words": ["bad"],
        "allowed_token_ids": [4, 5],
        "include_stop_str_in_output": True,
    }
    want = SamplingParams(
        max_tokens=5,
        logprobs=2,
        **{
            **given,
            "stop": ("a", "b"),
            "stop_token_ids": (7,),
            "logit_bias": {9: 1.5},
            "bad_words": ("bad",),
            "allowed_token_ids": (4, 5),
        },
    )
    assert completion(**given, logprobs=2).params(5) == want
    assert chat(**given, logprobs=True, top_logprobs=2).params(5) == want
    default = SamplingParams()
    changed = [f for f in SamplingParams.__struct_fields__ if getattr(want, f) != getattr(default, f)]
    assert set(changed) == set(SamplingParams.__struct_fields__) - {
        "logprob_start_len",
        "grammar",
    }  # the first only in Python


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_bounds_of_prompt_logprobs_and_cache_salt(fields: dict[str, Any], param: str) -> None:
    for body in (completion, chat):
        with pytest.raises(ApiError) as error:
            body(**fields).params(5)
        assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"tools": []},
        {"max_completion_tokens": 3},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
    ],
)
def test_a_plain_chat_refuses_what_extensions_add(fields: dict[str, Any]) -> None:
    """Without the extension ``chat``, its parameters are refused by name. The others are those of a full chat."""
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "seed": 3, "stop": "."}
    plain, full = parse(json.dumps(body).encode(), ChatRequest), chat(**body)
    assert plain.params(5) == full.params(5)
    assert plain.to_prompt() == full.to_prompt()
    name = "stream_options" if "stream" in fields else next(iter(fields))
    with pytest.raises(ApiError, match=name) as error:
        parse(json.dumps(body | fields).encode(), ChatRequest).to_prompt()
    assert (error.value.status, error.value.param) == (400, name)


def test_null_equals_missing() -> None:
    """A parameter with the value null is treated as a missing parameter."""
    names = [field.name for field in msgspec.structs.fields(CompletionRequest) if field.name != "prompt"]
    assert completion(**dict.fromkeys([*names, *HINTS, *REFUSED])) == completion()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_parameters(name: str) -> None:
    with pytest.raises(ApiError, match=name) as error:
        completion(**{name: ["something", "else"]})
    assert (error.value.status, error.value.param) == (400, name)
    for value in REFUSED[name].neutral:
        assert completion(**{name: value}) == completion()


@pytest.mark.parametrize("name", sorted(HINTS))
def test_hints_are_accepted(name: str) -> None:
    assert completion(**{name: ["something", "else"]}) == completion()


def test_best_of_n() -> None:
    """``best_of`` is accepted if all choices that are made are returned."""
    assert completion(best_of=1) == completion()
    assert completion(best_of=3, n=3) == completion(n=3)
    for fields in ({"best_of": 2}, {"best_of": 2, "n": 1}, {"best_of": 1, "n": 2}):
        with pytest.raises(ApiError, match="best_of") as error:
            completion(**fields)
        assert error.value.param == "best_of"


def test_whole_numbers_may_have_a_fraction_of_zero() -> None:
    assert completion(max_tokens=3.0, n=2.0, temperature=1.0) == completion(max_tokens=3, n=2, temperature=1)
    for value in (3.5, 1e300, -1e17):
        with pytest.raises(ApiError) as error:
            completion(max_tokens=value)
        assert error.value.param == "max_tokens"


def test_boolean_is_not_a_number() -> None:
    """A boolean is refused for a number parameter, and a number for a boolean parameter."""
    for fields in ({"best_of": True}, {"min_tokens": False}, {"n": True}, {"max_tokens": True}, {"echo": 0}):
        with pytest.raises(ApiError):
            completion(**fields)


def test_prompt_types() -> None:
    ids = TokensPrompt(pack_ids([1, 2]))
    assert completion(prompt="a").to_prompts() == [TextPrompt("a")]
    assert completion(prompt=["a", "b"]).to_prompts() == [TextPrompt("a"), TextPrompt("b")]
    assert completion(prompt=[1, 2]).to_prompts() == [ids]
    assert completion(prompt=[[1, 2], [1, 2]]).to_prompts() == [ids, ids]


@pytest.mark.parametrize("value", [None, "", [], {}, False])
def test_neutral_message_fields(value: Any) -> None:
    """Fields that ask for nothing are left out, known or not, and the others keep their order and form."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"refusal": value, "content": parts, "name": value, "role": "user"},
        {"role": "assistant", "annotations": value, "tool_calls": [{"id": "1"}], "content": None, "audio": value},
    ]
    assert chat(messages=messages).to_prompt().messages == [
        {"content": parts, "role": "user"},
        {"role": "assistant", "tool_calls": [{"id": "1"}], "content": None},
    ]


@pytest.mark.parametrize("value", [0, True, "x", [None], {"a": None}])
def test_unknown_message_field_is_refused(value: Any) -> None:
    with pytest.raises(ApiError, match=r"messages\[0\]\.refusal") as error:
        chat(messages=[{"role": "user", "content": "x", "refusal": value}]).to_prompt()
    assert (error.value.status, error.value.param) == (400, "messages")


def test_top_logprobs_of_nothing() -> None:
    """``top_logprobs: 0`` without ``logprobs`` asks for nothing."""
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None
    assert chat(logprobs=True, top_logprobs=0).num_logprobs == 0
    with pytest.raises(ApiError, match="only allowed with logprobs"):
        assert chat(top_logprobs=1).num_logprobs


@pytest.mark.parametrize(
    ("role", "field"),
    [("user", "tool_calls"), ("tool", "tool_calls"), ("system", "reasoning_content"), ("assistant", "tool_call_id")],
)
def test_field_of_another_role_is_refused(role: str, field: str) -> None:
    """A field that templates read in messages of another role is refused here, and accepted there."""
    value: Any = [{"id": "1"}] if field == "tool_calls" else "x"
    with pytest.raises(ApiError, match=f"^{field} belongs to") as error:
        chat(messages=[{"role": role, "content": "a", field: value}]).to_prompt()
    assert (error.value.status, error.value.param) == (400, "messages")
    for right in FIELD_ROLES[field]:
        chat(messages=[{"role": right, "content": "a", field: value}]).to_prompt()


@pytest.mark.parametrize(
    ("parse_one", "accepted", "refused"),
    [
        ("chat", {"add_special_tokens": False, "add_generation_prompt": True}, {"add_special_tokens": True}),
        ("completion", {"add_special_tokens": True}, {"add_special_tokens": False}),
        ("completion", {}, {"add_generation_prompt": True}),
        ("chat", {"stream_options": {"include_obfuscation": False}}, {"stream_options": {"include_obfuscation": True}}),
        ("chat", {"stream_options": {"include_usage": True}}, {"stream_options": {"x": False}}),
    ],
)
def test_value_without_effect(parse_one: str, accepted: dict[str, Any], refused: dict[str, Any]) -> None:
    """A value that would change something in this kind of body, and does not, is refused."""
    make = {"chat": chat, "completion": completion}[parse_one]
    make(**accepted)
    with pytest.raises(ApiError) as error:
        make(**refused)
    assert error.value.status == 400


def test_num_logprobs_of_chat() -> None:
    assert chat().num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).num_logprobs == 4


def test_manual_lists_every_parameter() -> None:
    named = set(re.findall(r"`(\w+)`", MANUAL.read_text()))
    for kind in (CompletionRequest, FullChatRequest, TokenizeBody, DetokenizeBody):
        assert {field.name for field in msgspec.structs.fields(kind)} <= named
