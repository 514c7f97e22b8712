"""Whole answers: random schemas of the kinds that programs send, sampled from ``tutor``, and read by `jsonschema`."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema
import pytest

from minisgl import LLM, SamplingParams
from minisgl.plugins.grammar import plain as plain_module
from minisgl.sampling_params import Grammar

NAMES = ["id", "name", "tags", "address", "zip", "items", "note", "größe", "a b"]
PATTERNS = ["^[a-z]{1,8}$", r"^\d{4}-\d{2}-\d{2}$", "^(foo|bar)[0-9]{2}$", "^[A-Z]{3}$", "^#[0-9a-f]{6}$"]
COUNT = int(os.environ.get("MINISGL_SCHEMAS", "40"))
"""The number of schemas."""
CONSTANTS = ["red", "green", "blue", 1, 2.5, None, True, "größe"]


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


@pytest.mark.parametrize("name", ["plain", "llguidance"])
def test_answers_follow_their_schemas(name: str) -> None:
    """All answers end by themselves, and are valid, at temperature 1 and next to requests with other schemas.

    ``make check-schemas`` does it with 500 schemas.
    """
    if name == "llguidance":
        pytest.importorskip("llguidance")
    rng = random.Random(7)
    schemas = [schema(rng) for _ in range(COUNT)]
    params = [
        SamplingParams(max_tokens=400, temperature=1.0, seed=i, grammar=Grammar("json_schema", json.dumps(each)))
        for i, each in enumerate(schemas)
    ]
    with LLM("tutor", overrides=["device=cpu", f"grammar={name}", "num_pages=2000"]) as llm:
        answers = llm.generate([f"JSON {i}" for i in range(len(params))], params, progress=False)
    assert [answer.finish_reason for answer in answers] == ["stop"] * len(answers)
    for each, answer in zip(schemas, answers, strict=True):
        jsonschema.validate(json.loads(answer.text), each)


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
        llm.scheduler.check_idle()
    assert plain_module.MASK_BYTES
