"""Each row of docs/reference/compatibility.md is true: it is sent to a server."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from minisgl.chapters.site.compatibility import OPENAI, names, treatment
from minisgl.plugins.http.apis.completion import CompletionRequest
from minisgl.plugins.http.apis.parameters import FullChatRequest
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once
BODIES: list[tuple[str, Any, dict[str, Any]]] = [
    ("/v1/chat/completions", FullChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ("/v1/completions", CompletionRequest, {"prompt": "Hi", "max_tokens": 2}),
]
GOOD: dict[str, Any] = {
    "add_generation_prompt": False, "allowed_token_ids": [100, 101], "bad_words": ["bad"], "cache_salt": "x",
    "chat_template_kwargs": {}, "ebnf": 'start: "a"', "echo": True, "frequency_penalty": 0.5,
    "grammar": {"kind": "regex", "text": "a"}, "guided_choice": ["a"], "guided_grammar": 'start: "a"',
    "guided_json": {"type": "boolean"}, "guided_regex": "a", "ignore_eos": True, "include_stop_str_in_output": True,
    "json_schema": '{"type": "boolean"}', "logit_bias": {"5": 1.0}, "max_completion_tokens": 2, "max_tokens": 2,
    "messages": [{"role": "user", "content": "Hi"}], "min_p": 0.1, "min_tokens": 2, "model": "tutor", "n": 2,
    "parallel_tool_calls": False, "presence_penalty": 0.5, "priority": 0, "prompt": "Hi", "prompt_logprobs": 1,
    "reasoning_effort": "high", "enable_thinking": True,
    "regex": "a", "repetition_penalty": 1.1, "response_format": {"type": "json_object"}, "return_token_ids": True,
    "seed": 1, "skip_special_tokens": False, "stop": ["x"], "stop_token_ids": [5], "stream": True,
    "structured_outputs": {"regex": "a"}, "temperature": 0.5, "tool_choice": "none", "tools": [], "top_k": 5,
    "top_p": 0.5, "truncate_prompt_tokens": 5,
}  # fmt: skip
"""A value of each parameter that has an effect."""
MORE: dict[str, dict[str, Any]] = {
    "logprobs": {"FullChatRequest": True, "CompletionRequest": 1},
    "top_logprobs": {"logprobs": True, "top_logprobs": 1},
    "continue_final_message": {"add_generation_prompt": False, "continue_final_message": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize(("path", "kind", "body"), BODIES, ids=["chat", "completion"])
def test_each_row(tutor: Server, path: str, kind: Any, body: dict[str, Any]) -> None:
    before = tutor.metrics()
    hints = []
    with httpx.Client(base_url=tutor.url, timeout=60) as http:
        for name in names():
            found, reason = treatment(name, kind)
            if found == "done":
                fields = {"logprobs": MORE[name][kind.__name__]} if name == "logprobs" else MORE.get(name)
                fields = {name: GOOD[name]} if fields is None else fields
                given = {k: v for k, v in body.items() if k != "max_tokens" or name != "max_completion_tokens"}
                answer = http.post(path, json={**given, **fields})
                assert answer.status_code == 200, (name, answer.text)
                continue
            answer = http.post(path, json={**body, name: ["something", "else"]})
            if found == "hint":
                hints.append(name)
                assert answer.status_code == 200, (name, answer.text)
            else:
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name)
                assert reason in error["message"] or error["code"] == "unknown_parameter"
    after = tutor.metrics()
    for name in hints:
        key = f'minisgl_hint_parameters_total{{name="{name}"}}'
        assert after[key] == before.get(key, 0) + 1


def test_openai_names() -> None:
    """The page has each parameter of the installed library."""
    known = {*chats.CompletionCreateParamsBase.__annotations__, *completions.CompletionCreateParamsBase.__annotations__}
    assert known <= set(OPENAI)


def test_openapi(tutor: Server) -> None:
    """The description has the routes, and the schemas of bodies agree with what the server accepts."""
    with httpx.Client(base_url=tutor.url, timeout=60) as http:
        made = http.get("/openapi.json").json()
        assert "openapi.json" in http.get("/docs").text
        assert {"/v1/models", "/v1/models/{name}", "/health", "/metrics", "/tokenize"} < made["paths"].keys()
        assert made["paths"]["/v1/models"].keys() == {"get"}
        components = {"components": made["components"]}
        for path, kind, body in BODIES:
            reference = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            validator = jsonschema.Draft202012Validator({**reference, **components})
            known = made["components"]["schemas"][kind.__name__]["properties"]
            assert known.keys() == {name for name in names() if treatment(name, kind)[0] != "refused"}
            for fields in ({}, {"n": 2}, {"temperature": None}, {"stop": "x"}, {"user": "me"}, {"max_tokens": 3.0}):
                validator.validate({**body, **fields})
                assert http.post(path, json={**body, **fields}).status_code == 200
            for fields in ({"n": 0}, {"temperature": "hot"}, {"colour": 1}, {"top_p": 0}, {"allowed_token_ids": []}):
                assert not validator.is_valid({**body, **fields}), fields
                assert http.post(path, json={**body, **fields}).status_code == 400


def test_the_description_has_the_sizes_of_the_model(tutor: Server) -> None:
    """Token ids are those of its vocabulary, and bodies of other APIs are described."""
    with httpx.Client(base_url=tutor.url, timeout=60) as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        tokens = schemas["DetokenizeBody"]["properties"]["tokens"]
        assert {"ResponsesRequest", "MessagesRequest", "CountTokensRequest"} <= schemas.keys()
        most = tokens["items"]["maximum"]
        answers = [http.post("/detokenize", json={"tokens": ids}) for ids in ([most], [float(most)], [most + 1])]
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        assert http.post("/detokenize", json={"tokens": [1] * (tokens["maxItems"] + 1)}).status_code == 400
