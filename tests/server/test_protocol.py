"""Requests as clients send them: what is read, what is refused by name, and that the manual lists all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.core import SamplingParams
from minisgl.message import IdsPrompt, TextPrompt, pack_ids
from minisgl.server.errors import ApiError
from minisgl.server.protocol import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
    parse,
)

MANUAL = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "x"}]
    return parse(json.dumps({"messages": messages, **fields}).encode(), ChatRequest)


def test_every_sampling_parameter_arrives() -> None:
    """None of them is accepted and dropped on the way."""
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
    }
    want = SamplingParams(
        max_tokens=5,
        logprobs=2,
        **{**given, "stop": ("a", "b"), "stop_token_ids": (7,), "logit_bias": {9: 1.5}},
    )
    assert completion(**given).params(5, 2) == want
    assert chat(**given).params(5, 2) == want
    default = SamplingParams()
    changed = [f for f in SamplingParams.__struct_fields__ if getattr(want, f) != getattr(default, f)]
    assert set(changed) == set(SamplingParams.__struct_fields__)


def test_null_is_as_if_it_was_not_said() -> None:
    names = [field.name for field in msgspec.structs.fields(CompletionRequest) if field.name != "prompt"]
    assert completion(**dict.fromkeys([*names, *NEUTRAL])) == completion()


LABELS = ("metadata", "prompt_cache_key", "safety_identifier", "user")
"""Labels and hints, which a server may keep to itself: any value passes."""


@pytest.mark.parametrize("name", sorted(set(NEUTRAL) - set(LABELS)))
def test_what_is_lacking_is_refused_by_name(name: str) -> None:
    with pytest.raises(ApiError, match=name) as error:
        completion(**{name: ["something", "else"]})
    assert (error.value.status, error.value.param) == (400, name)
    for value in NEUTRAL[name]:
        assert completion(**{name: value}) == completion()


@pytest.mark.parametrize("name", LABELS)
def test_labels_pass(name: str) -> None:
    assert completion(**{name: ["something", "else"]}) == completion()


def test_nobody_can_say_true_where_a_number_is_meant() -> None:
    for fields in ({"best_of": True}, {"min_tokens": False}, {"n": True}, {"max_tokens": True}, {"echo": 0}):
        with pytest.raises(ApiError):
            completion(**fields)


def test_prompts_of_each_kind() -> None:
    ids = IdsPrompt(pack_ids([1, 2]))
    assert completion(prompt="a").prompts() == [TextPrompt("a")]
    assert completion(prompt=["a", "b"]).prompts() == [TextPrompt("a"), TextPrompt("b")]
    assert completion(prompt=[1, 2]).prompts() == [ids]
    assert completion(prompt=[[1, 2], [1, 2]]).prompts() == [ids, ids]


def test_messages_as_a_template_reads_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]
    assert chat(messages=messages).chat().turns == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]


def test_how_many_logprobs_a_chat_asks_for() -> None:
    assert chat().alternatives is None
    assert chat(logprobs=True).alternatives == 0
    assert chat(logprobs=True, top_logprobs=4).alternatives == 4


def test_the_manual_lists_every_parameter() -> None:
    named = set(re.findall(r"`(\w+)`", MANUAL.read_text()))
    for kind in (CompletionRequest, ChatRequest, TokenizeBody, DetokenizeBody):
        assert {field.name for field in msgspec.structs.fields(kind)} <= named
