"""JSON schemas as parts of a grammar: the JSON texts that a schema allows, in one fixed form.

The form is that of `json.dumps`: a space after each comma and colon, no other space, properties in the order of the
schema. So an answer of a bounded schema is bounded. Source: https://json-schema.org/draft/2020-12/json-schema-validation
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from minisgl.plugins.grammar.characters import ALL, byte_ranges, complement, quoted, union
from minisgl.plugins.grammar.network import Expression, Network, byte, choice, literal, repeat, rule, sequence
from minisgl.plugins.grammar.regex import RegexError, parse

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment",
     "$anchor", "id", "definitions", "$defs"}
)  # fmt: skip
"""Keywords that don't change which values are allowed."""
KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Type → the keywords that are supported for its values."""
LIMITING = {
    "string": frozenset({"format", "contentEncoding", "contentMediaType", "contentSchema"}),
    "integer": frozenset({"multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset(
        {"uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "additionalItems"}
    ),
    "object": frozenset(
        {"patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
         "dependentSchemas", "dependencies", "unevaluatedProperties"}
    ),
}  # fmt: skip
"""Type → keywords of JSON schema that limit its values, and that are not supported here."""
ANY_TYPE = frozenset({"not", "if", "then", "else", "oneOf", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"})
"""Keywords of JSON schema that are not supported here, whatever the type."""
COMBINED = ("$ref", "enum", "const", "anyOf", "allOf")
MAX_DEPTH = 64
"""The largest number of schemas inside each other."""
MAX_COUNT = 10_000
"""The largest number of characters or items that a schema may ask for."""

_DIGIT, _DIGITS = byte(0x30, 0x39), repeat(byte(0x30, 0x39))
_INTEGER = sequence(repeat(literal(b"-"), 0, 1), choice(literal(b"0"), sequence(byte(0x31, 0x39), _DIGITS)))
_FRACTION = sequence(literal(b"."), _DIGIT, _DIGITS)
_EXPONENT = sequence(
    choice(literal(b"e"), literal(b"E")), repeat(choice(literal(b"+"), literal(b"-")), 0, 1), _DIGIT, _DIGITS
)
_NUMBER = sequence(_INTEGER, repeat(_FRACTION, 0, 1), repeat(_EXPONENT, 0, 1))
_CHARACTER = quoted(ALL)
_QUOTE, _COMMA = literal(b'"'), literal(b", ")


class SchemaError(ValueError):
    """A schema is wrong, allows no value, or has a keyword that is not supported. The text names it and its place."""


def strict(schema: Any) -> Any:
    """Return a copy of a schema in which objects with ``properties`` have no others, unless it speaks of others.

    Otherwise nearly every schema would allow objects without end; OpenAI's strict mode asks for the same. A property
    that is required and has no schema of its own gets one that allows any value.
    """
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            copy[key] = {name: strict(each) for name, each in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            copy[key] = [strict(each) for each in value]
        elif key in _SCHEMAS:
            copy[key] = strict(value)
    if isinstance(copy.get("properties"), dict) and not copy.keys() & _OTHER_PROPERTIES:
        names = [name for name in copy.get("required") or [] if isinstance(name, str)]
        copy["properties"] |= {name: {} for name in names if name not in copy["properties"]}
        copy["additionalProperties"] = False
    return copy


_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMA_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains", "unevaluatedItems"})
_OTHER_PROPERTIES = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"}
)


def grammar_of(schema: Any, name: str = "") -> Expression:
    """Return the JSON texts that a schema allows. Raise `SchemaError` if it is wrong or not supported.

    Each schema becomes a rule, so that a schema may refer to itself. `Network` raises the error of such a rule's body.
    Several schemas of one network have different names.
    """
    return _Compiler(schema, name).value(schema, "#")


class _Compiler:
    def __init__(self, root: Any, name: str):
        self._root, self._name = root, name

    def value(self, schema: Any, where: str) -> Expression:
        """Return the texts of one schema. ``where`` is its place in the whole, for error messages."""
        if where.count("/") > 2 * MAX_DEPTH:
            raise SchemaError(f"{where:.200}: the schema is too deep.")
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, dict):
            raise SchemaError(f"{where}: a schema must be an object, not {json.dumps(schema):.40}.")
        self._check_keywords(schema, where)
        if "$ref" in schema:
            return self._reference(schema["$ref"], where)
        if "enum" in schema or "const" in schema:
            return self._values(schema, where)
        for key in ("anyOf", "allOf"):
            if key in schema:
                return self._combined(schema, key, where)
        types = self._types(schema, where)
        return choice(*(getattr(self, f"_{kind}")(schema, where) for kind in types))

    def _check_keywords(self, schema: Mapping[str, Any], where: str) -> None:
        types = self._types(schema, where)
        refused = [ANY_TYPE, *(LIMITING.get(kind, frozenset()) for kind in types)]
        names = sorted(key for key in schema if any(key in each for each in refused))
        if "integer" not in types and "number" not in types:
            names = [name for name in names if name not in LIMITING["number"]]
        if names:
            raise SchemaError(f"{where}: the keyword {json.dumps(names[0])} is not supported.")
        combined = [key for key in COMBINED if key in schema]
        beside = schema.keys() - ANNOTATIONS - set(combined)
        allowed = {"type"} if combined and combined[0] in ("enum", "const") else set()
        known = {"type", *COMBINED, *(key for group in (*KEYWORDS.values(), *LIMITING.values()) for key in group)}
        if combined and (beside & known) - allowed:
            other = sorted((beside & known) - allowed)[0]
            raise SchemaError(f"{where}: {json.dumps(other)} beside {json.dumps(combined[0])} is not supported.")
        if len(combined) > 1 and set(combined) != {"enum", "const"}:
            raise SchemaError(f"{where}: {combined[1]!r} beside {combined[0]!r} is not supported.")

    def _types(self, schema: Mapping[str, Any], where: str) -> list[str]:
        given = schema.get("type", list(KEYWORDS))
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or any(each not in KEYWORDS for each in types):
            raise SchemaError(f"{where}: wrong type {json.dumps(given):.60}: {', '.join(KEYWORDS)}, or a list of them.")
        return [each for each in types if each != "integer" or "number" not in types]

    def _count(self, schema: Mapping[str, Any], key: str, where: str, default: Any) -> Any:
        value = schema.get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise SchemaError(f"{where}: {key} must be a whole number, not {json.dumps(value):.40}.")
        if value > MAX_COUNT:
            raise SchemaError(f"{where}: {key} is at most {MAX_COUNT} here.")
        return int(value)

    def _bounds(self, schema: Mapping[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
        low, high = self._count(schema, least, where, 0), self._count(schema, most, where, None)
        if high is not None and high < low:
            raise SchemaError(f"{where}: {least} is greater than {most}.")
        return low, high

    # ---- combinations --------------------------------------------------------------------------------------

    def _reference(self, pointer: Any, where: str) -> Expression:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaError(f"{where}: $ref must point into the same schema, as in '#/$defs/name'.")
        target = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise SchemaError(f"{where}: $ref {json.dumps(pointer):.80} points to nothing.")
        return rule(f"ref {self._name}{pointer}", lambda network, start: self.value(target, pointer)(network, start))

    def _values(self, schema: Mapping[str, Any], where: str) -> Expression:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise SchemaError(f"{where}: enum must be a list of values.")
        if "const" in schema:
            values = [value for value in values if _same(value, schema["const"])]
        types = self._types(schema, where)
        values = [value for value in values if any(kind in types for kind in _kinds(value))]
        if not values:
            raise SchemaError(f"{where}: none of its values has the schema's type.")
        return choice(*map(constant, values))

    def _combined(self, schema: Mapping[str, Any], key: str, where: str) -> Expression:
        parts = schema[key]
        if not isinstance(parts, list) or not parts:
            raise SchemaError(f"{where}: {key} must be a list of schemas.")
        if key == "allOf" and len(parts) > 1:
            raise SchemaError(f"{where}: 'allOf' with several schemas is not supported.")
        return choice(*(self.value(part, f"{where}/{key}/{i}") for i, part in enumerate(parts)))

    # ---- types ---------------------------------------------------------------------------------------------

    def _any(self) -> Expression:
        def body(network: Network, start: int) -> int:
            kinds = (getattr(self, f"_{kind}")({}, "#") for kind in KEYWORDS if kind != "integer")
            return choice(*kinds)(network, start)

        return rule("any", body)

    def _null(self, schema: Mapping[str, Any], where: str) -> Expression:
        return literal(b"null")

    def _boolean(self, schema: Mapping[str, Any], where: str) -> Expression:
        return choice(literal(b"true"), literal(b"false"))

    def _number(self, schema: Mapping[str, Any], where: str) -> Expression:
        return _NUMBER

    def _integer(self, schema: Mapping[str, Any], where: str) -> Expression:
        bounds: dict[str, float | None] = {}
        for key in KEYWORDS["integer"]:
            value = schema.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise SchemaError(f"{where}: {key} must be a number, not {json.dumps(value):.40}.")
            bounds[key] = value
        lows = [bounds["minimum"], None if bounds["exclusiveMinimum"] is None else bounds["exclusiveMinimum"] + 1]
        highs = [bounds["maximum"], None if bounds["exclusiveMaximum"] is None else bounds["exclusiveMaximum"] - 1]
        given = [value for value in (*lows, *highs) if value is not None]
        if not given:
            return _INTEGER
        if any(value != int(value) or abs(value) >= 10**18 for value in given):
            raise SchemaError(f"{where}: bounds of an integer must be whole numbers below 10^18.")
        low = max((int(value) for value in lows if value is not None), default=None)
        high = min((int(value) for value in highs if value is not None), default=None)
        if low is not None and high is not None and low > high:
            raise SchemaError(f"{where}: no integer lies within its bounds.")
        return _integers(low, high)

    def _string(self, schema: Mapping[str, Any], where: str) -> Expression:
        low, high = self._bounds(schema, "minLength", "maxLength", where)
        if "pattern" not in schema:
            return sequence(_QUOTE, repeat(_CHARACTER, low, high), _QUOTE)
        if low or high is not None:
            raise SchemaError(f"{where}: 'pattern' beside 'minLength' or 'maxLength' is not supported.")
        if not isinstance(schema["pattern"], str):
            raise SchemaError(f"{where}: pattern must be a string.")
        try:
            return sequence(_QUOTE, parse(schema["pattern"], quoted, anchored=False), _QUOTE)
        except RegexError as error:
            raise SchemaError(f"{where}: pattern: {error}") from None

    def _array(self, schema: Mapping[str, Any], where: str) -> Expression:
        low, high = self._bounds(schema, "minItems", "maxItems", where)
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(prefix, list):
            raise SchemaError(f"{where}: prefixItems must be a list of schemas.")
        if items is False:
            high = len(prefix) if high is None else min(high, len(prefix))
            if high < low:
                raise SchemaError(f"{where}: minItems is greater than the number of items that it allows.")
        firsts = [self.value(each, f"{where}/prefixItems/{i}") for i, each in enumerate(prefix)]
        other = rule(f"items {where} {id(schema)}", self.value(items, f"{where}/items")) if items is not False else None
        return _array(firsts, other, low, high)

    def _object(self, schema: Mapping[str, Any], where: str) -> Expression:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise SchemaError(f"{where}: properties must be an object.")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{where}: required must be a list of names.")
        more = [name for name in dict.fromkeys(required) if name not in properties]
        if more and others is False:
            raise SchemaError(f"{where}: the property {json.dumps(more[0])} is required and not allowed.")
        schemas = [*properties.items(), *((name, others) for name in more)]
        members = [
            (_member(constant(name), self.value(each, f"{where}/properties/{name}")), name in required)
            for name, each in schemas
        ]
        other = None
        if others is not False:
            value = self.value(others, f"{where}/additionalProperties")
            names = _other_name([name for name, _ in schemas])
            other = rule(f"others {where} {id(schema)}", _member(names, value))
        return _object(members, other)


def constant(value: Any) -> Expression:
    """Return the texts of one JSON value. Only control characters in strings have more than one form."""
    match value:
        case str():
            return sequence(_QUOTE, *(quoted(((ord(c), ord(c)),)) for c in value), _QUOTE)
        case list():
            return _array([constant(each) for each in value], None, len(value), len(value))
        case dict():
            return _object([(_member(constant(name), constant(each)), True) for name, each in value.items()], None)
        case float():
            return literal(f"{Decimal(repr(value)).normalize():f}".encode())
    return literal(json.dumps(value).encode())


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _kinds(value: Any) -> tuple[str, ...]:
    """Return the types of a value: an integer is a number too."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case dict():
            return ("object",)
    return ("integer", "number") if value == int(value) else ("number",)


def _member(name: Expression, value: Expression) -> Expression:
    return sequence(name, literal(b": "), value)


def _other_name(names: Sequence[str]) -> Expression:
    """Return any string but ``names``."""

    def add(network: Network, start: int) -> int:
        rest, end = network.node(), network.node()
        network.skip(repeat(_CHARACTER)(network, rest), end)
        nodes = {"": _QUOTE(network, start)}
        for name in sorted({each[:length] for each in names for length in range(1, len(each) + 1)}):
            char = ord(name[-1])
            nodes[name] = quoted(((char, char),))(network, nodes[name[:-1]])
        for begin, node in nodes.items():
            following = union((ord(each[-1]), ord(each[-1])) for each in nodes if each and each[:-1] == begin)
            network.skip(quoted(complement(following))(network, node), rest)
            if begin not in names:
                network.skip(node, end)
        return _QUOTE(network, end)

    return add


def _array(firsts: Sequence[Expression], other: Expression | None, low: int, high: int | None) -> Expression:
    """Return an array of ``low`` to ``high`` items: ``firsts`` in order, then any number of ``other``."""

    def add(network: Network, start: int) -> int:
        end = network.node()
        empty, some = literal(b"[")(network, start), network.node()  # before the first item, and after an item
        for count in itertools.count():
            if count >= low:
                network.skip(empty, end)
                network.skip(some, end)
            item = firsts[count] if count < len(firsts) else other
            if item is None or count == high:
                break
            before = network.skip(empty, network.node())
            network.skip(_COMMA(network, some), before)
            after = item(network, before)
            empty, some = network.node(), after
            if count >= max(low, len(firsts)) and high is None:
                network.skip(_COMMA(network, after), before)
                network.skip(after, end)
                break
        return literal(b"]")(network, end)

    return add


def _object(members: Sequence[tuple[Expression, bool]], other: Expression | None) -> Expression:
    """Return an object with ``members`` in order, each with whether it is required, then any number of ``other``."""

    def add(network: Network, start: int) -> int:
        empty, some = literal(b"{")(network, start), network.node()  # before the first member, and after a member
        for member, required in [*members, *([(other, False)] if other is not None else [])]:
            before, after = network.skip(empty, network.node()), network.node()
            network.skip(_COMMA(network, some), before)
            network.skip(member(network, before), after)
            if required:
                empty = network.node()  # no edge leads there
            else:
                network.skip(some, after)
            if member is other:
                network.skip(_COMMA(network, after), before)
            some = after
        end = network.skip(empty, network.node())
        return literal(b"}")(network, network.skip(some, end))

    return add


def _integers(low: int | None, high: int | None) -> Expression:
    """Return the integers from ``low`` to ``high``; None: no bound."""
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        if low is not None and high is not None and high >= 0:
            least = 0  # -0 is an integer too
        parts.append(sequence(literal(b"-"), _naturals(least, None if low is None else -low)))
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return choice(*parts)


def _naturals(low: int, high: int | None) -> Expression:
    lengths = range(len(str(low)), len(str(low if high is None else high)) + 1)
    parts = []
    for length in lengths:
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = 10**length - 1 if high is None else min(high, 10**length - 1)
        for ranges in byte_ranges(str(first).encode(), str(last).encode(), 0x30, 0x39):
            parts.append(sequence(*(byte(*each) for each in ranges)))  # noqa: PERF401 - two loops
    if high is None:
        parts.append(sequence(byte(0x31, 0x39), repeat(_DIGIT, lengths[-1])))
    return choice(*parts)
