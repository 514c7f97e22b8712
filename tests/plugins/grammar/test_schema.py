"""JSON schemas as automata: what they allow, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.plugins.grammar.automaton import DEAD, START, Automaton
from minisgl.plugins.grammar.network import GrammarTooLargeError, Network
from minisgl.plugins.grammar.schema import SchemaError, grammar_of, strict

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


def allows(schema: Any, text: str) -> bool:
    automaton = Automaton(Network(grammar_of(strict(schema))))
    state = automaton.walk(START, text.encode())
    return state != DEAD and automaton.is_final(state)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (PERSON, ['{"name": "Ada"}', '{"name": "Ada", "age": 36}'],
         ["{}", '{"name":"Ada"}', '{"age": 36, "name": "Ada"}', '{"name": "Ada", "age": -1}', '{"name": "Adam A"}',
          '{"name": "Ada", "x": 1}']),
        ({"type": "object"}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{a: 1}"]),
        ({}, ["1", '"x"', "[true, false]", "null", "-0.5e-3"], ["01", "tru", "+1", "1."]),
        ({"type": "integer", "minimum": -5, "maximum": 120}, ["-5", "0", "7", "120"], ["-6", "121", "1.0", "007"]),
        ({"type": "integer", "exclusiveMinimum": 9}, ["10", "11", "100"], ["9", "5"]),
        ({"enum": ["a", 1, None, {"x": [1.5]}]}, ['"a"', "1", "null", '{"x": [1.5]}'], ['"b"', "1.0", "{}"]),
        ({"type": "string", "minLength": 2, "maxLength": 2}, ['"éé"', r'"\n\""'], ['"a"', '"abc"', '"\n\n"']),
        ({"type": "string", "pattern": "^[A-Z]+-\\d$"}, ['"AB-1"'], ['"AB-12"', '"ab-1"']),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"],
         ["[]", "[1, 2, 3]", "[1,2]", '["a"]']),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[]", "[null]"], ["[null, 1]"]),
        ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
        ({"anyOf": [{"type": "integer"}, {"const": "no"}]}, ["3", '"no"'], ['"yes"']),
        ({"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}},
         ["[]", "[[], [[]]]"], ["[1]", "[[]"]),
        ({"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
         ['{"ab": null}', '{"a": 1}', '{"abc": 1, "b": 2}', '{"ab": null, "x": 1}'], ['{"ab": 1}', '{"x": null}']),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "z"]}, ['{"a": null, "z": []}'],
         ['{"a": null}']),
        ({"type": "object", "properties": {"properties": {"type": "null"}}}, ['{"properties": null}', "{}"],
         ['{"type": null}']),
    ],
)  # fmt: skip
def test_allowed_texts(schema: Any, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not allows(schema, text)] == []
    assert [text for text in no if allows(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "number", "minimum": 0}, "minimum"),
        ({"type": "integer", "multipleOf": 2}, "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"oneOf": [{"type": "string"}]}, "oneOf"),
        ({"not": {}}, "not"),
        ({"anyOf": [{}], "type": "string"}, "type"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"type": "str"}, "type"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "bounds"),
        ({"$ref": "https://example.com/schema"}, r"\$ref"),
        ({"$ref": "#/$defs/none"}, r"\$ref"),
        ({"enum": []}, "enum"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
        ({"type": "object", "properties": {"a": {"properties": {"b": {"type": "string", "format": "date"}}}}}, "a/.*b"),
        (3, "object"),
        ({"type": "array", "items": [{}]}, "items"),
    ],
)
def test_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(SchemaError, match=named):
        Network(grammar_of(strict(schema)))


def test_sizes_are_bounded() -> None:
    """A schema that would need too many nodes, or that refers to itself at once, is refused."""
    big = {"type": "array", "minItems": 9000, "items": {"type": "array", "minItems": 9000, "items": {"enum": [1] * 50}}}
    wide = {"enum": [f"{i:01000d}" for i in range(300)]}
    loop = {"$ref": "#"}
    for schema in (wide, loop):
        with pytest.raises(GrammarTooLargeError):
            Automaton(Network(grammar_of(strict(schema))))
    Automaton(Network(grammar_of(strict(big))))  # items are rules: this one stays small
    deep: Any = {}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(SchemaError, match="deep"):
        Network(grammar_of(strict(deep)))


def test_control_characters_are_escaped() -> None:
    """What the automaton allows is JSON: `json.loads` reads it."""
    automaton = Automaton(Network(grammar_of({"enum": ['\n\x01\x7f"\\/é']})))
    for text in (r'"\n\u0001\u007f\"\\/é"', r'"\u000a\u0001\u007F\"\\/é"'):
        assert automaton.is_final(automaton.walk(START, text.encode()))
        assert json.loads(text) == '\n\x01\x7f"\\/é'
