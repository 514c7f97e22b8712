"""Whole answers: random schemas of the kinds that programs send, sampled from ``tutor``, and read by `jsonschema`."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from minisgl import LLM, SamplingParams
from minisgl.plugins.grammar import plain as plain_module
from minisgl.sampling_params import Grammar, InvalidRequestError
from minisgl.testing.idle import check_idle

NAMES = ["id", "name", "tags", "address", "zip", "items", "note", "größe", "a b"]
PATTERNS = ["^[a-z]{1,8}$", r"^\d{4}-\d{2}-\d{2}$", "^(foo|bar)[0-9]{2}$", "^[A-Z]{3}$", "^#[0-9a-f]{6}$"]
COUNT = int(os.environ.get("MINISGL_SCHEMAS", "40"))
"""The number of schemas."""
CONSTANTS = ["red", "green", "blue", 1, 2.5, None, True, "größe"]
RARE: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
    "patternProperties": {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "maxProperties": 2},
    "minProperties": {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1},
    "contains": {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "maxItems": 3},
    "if": {"type": "string", "if": {"maxLength": 3}, "then": {"pattern": "^a"}},
    "not": {"type": "integer", "not": {"const": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
}
"""A keyword → a schema with it, which a plugin refuses unless it supports the keyword."""


REST = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema whose values have a bounded length."""
    kind = rng.random()
    if depth > 2 or kind < 0.45:
        simple: list[dict[str, Any]] = [
            {"type": "string", "maxLength": rng.randint(0, 20)},
            {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 12)},
            {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 9999)},
            {"type": "boolean"},
            {"enum": rng.sample(CONSTANTS, rng.randint(1, 5))},
            {"const": rng.choice(["v1", 3, {"a": [1]}])},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": ["string", "null"], "maxLength": 5},
        ]
        return rng.choice(simple)
    if kind < 0.75:
        names = rng.sample(NAMES, rng.randint(1, 4))
        properties = {name: schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": rng.sample(names, rng.randint(0, len(names)))}
    if kind < 0.9:
        return {"type": "array", "items": schema(rng, depth + 1), "maxItems": rng.randint(1, 4)}
    if kind < 0.95:
        return {"type": "array", "prefixItems": [schema(rng, depth + 1) for _ in range(2)], "items": False}
    return {"anyOf": [schema(rng, depth + 1) for _ in range(2)]}


def document(rng: random.Random) -> dict[str, Any]:
    """Return a whole schema: a third have definitions and references to them, a few a keyword of `RARE`."""
    kind = rng.random()
    if kind < 0.05:
        return RARE[rng.choice(list(RARE))]
    if kind < 0.1:  # a list that is as long as the model likes
        return {"type": "object", "properties": {"value": schema(rng, 3), "next": REST}, "required": ["next"]}
    if kind < 0.4:
        inner = {"type": "object", "properties": {"of": {"$ref": "#/$defs/one"}, "at": schema(rng, 2)}}
        root = {"type": "array", "items": {"$ref": "#/definitions/two"}, "maxItems": 2}
        return root | {"$defs": {"one": schema(rng, 2)}, "definitions": {"two": inner}}
    return schema(rng)


@pytest.mark.parametrize("name", ["plain", "llguidance"])
def test_answers_follow_their_schemas(name: str) -> None:
    """Of the answers with a bounded length, 95 % end by themselves; all that end are valid. At temperature 1.

    Whether a list without an end ends is the model's choice. Schemas that are refused are counted, and the error names
    their keyword. ``make check-schemas`` does it with 500.
    """
    if name == "llguidance":
        pytest.importorskip("llguidance")
    rng = random.Random(7)
    schemas = [document(rng) for _ in range(COUNT)]
    params = [
        SamplingParams(max_tokens=400, temperature=1.0, seed=i, grammar=Grammar("json_schema", json.dumps(each)))
        for i, each in enumerate(schemas)
    ]
    with LLM("tutor", overrides=["device=cpu", f"grammar={name}", "num_pages=2000"]) as llm:
        refused = {i: error for i, each in enumerate(params) if (error := refusal(llm, each))}
        served = [i for i in range(COUNT) if i not in refused]
        answers = llm.generate([f"JSON {i}" for i in served], [params[i] for i in served], progress=False)
    for i, error in refused.items():
        assert schemas[i] in RARE.values() and any(f'"{key}"' in error for key in schemas[i]), (schemas[i], error)
    ended = {i: answer for i, answer in zip(served, answers, strict=True) if answer.finish_reason == "stop"}
    bounded = {i for i in served if REST not in schemas[i].get("properties", {}).values()}
    stopped = f"{len(bounded & set(ended))} of {len(bounded)} answers of a bounded length end by stop"
    print(f"{name}: {COUNT} schemas, {len(refused)} refused by name, {stopped}, {len(set(ended) - bounded)} others")
    assert len(bounded) > 0.8 * COUNT and len(bounded & set(ended)) >= 0.95 * len(bounded)
    for i, answer in ended.items():
        jsonschema.validate(json.loads(answer.text), schemas[i])


def refusal(llm: LLM, params: SamplingParams) -> str:
    """Return the error with which a request with these parameters is refused, or nothing if it is not."""
    try:
        llm.generate(["JSON"], replace(params, max_tokens=1), progress=False)
    except InvalidRequestError as error:
        return str(error)
    return ""


def test_a_grammar_that_grows_too_large_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with an error that says why; the requests beside it go on, and no page is lost."""
    monkeypatch.setattr("minisgl.plugins.grammar.automaton.MAX_PAIRS", 12)
    large = SamplingParams(max_tokens=300, temperature=1.0, seed=3, grammar=Grammar("regex", "(a|b)*a(a|b){14}c{200}"))
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM("tutor", overrides=["device=cpu", "grammar=plain", "num_pages=400"]) as llm:
        (alone,) = llm.generate(["What is a page?"], greedy, progress=False)
        failed, other = llm.generate(["x", "What is a page?"], [large, greedy], progress=False)
        assert failed.finish_reason == "error"
        assert "grammar" in (failed.choices[0].error)
        assert other.text == alone.text
        (again,) = llm.generate(["x"], large, progress=False)  # with the same automaton
        assert again.finish_reason == "error"
        check_idle(llm.scheduler)
    assert plain_module.MASK_BYTES
