"""Frames: literal texts around JSON values, as a model writes tool calls.

The text of such a grammar is JSON:

- a string is this text,
- a list has its entries one after another,
- ``{"any_of": [...]}`` is one of the entries,
- ``{"repeat": x, "separator": text}`` is x once or several times, with the text between,
- ``{"optional": x}`` is x or nothing,
- ``{"regex": pattern}`` is a text that the whole regular expression matches,
- ``{"token": text}`` is the special token of this text, or the text itself if the tokenizer has no such token,
- ``{"json_schema": schema}`` is a JSON value of the schema.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from minisgl.plugins.grammar.base import read_json, refuse, special_bytes
from minisgl.plugins.grammar.characters import utf8
from minisgl.plugins.grammar.network import Expression, choice, literal, repeat, sequence
from minisgl.plugins.grammar.regex import parse
from minisgl.plugins.grammar.schema import grammar_of, strict
from minisgl.sampling_params import Grammar

T = TypeVar("T")
MAX_DEPTH = 16
"""The largest number of lists and objects inside each other, beside those of schemas."""


class Frames:
    """How the parts of a frame become a grammar of some kind: one function for each.

    ``tokens`` has the ids of the tokenizer's special tokens.
    """

    def __init__(
        self,
        text: Callable[[str], T],
        sequence: Callable[[Sequence[T]], T],
        any_of: Callable[[Sequence[T]], T],
        repeat: Callable[[T, str], T],
        optional: Callable[[T], T],
        regex: Callable[[str], T],
        token: Callable[[int], T],
        schema: Callable[[Any], T],
        tokens: Mapping[str, int],
    ):
        self._text, self._sequence, self._any_of = text, sequence, any_of
        self._repeat, self._optional, self._regex, self._token = repeat, optional, regex, token
        self._schema, self._tokens = schema, tokens

    def read(self, grammar: Grammar) -> Any:
        """Return a grammar of the kind ``frame``. Raise `InvalidRequestError` for a wrong one."""

        def part(value: Any, depth: int) -> Any:
            if depth > MAX_DEPTH:
                raise refuse(grammar, f"A frame has at most {MAX_DEPTH} lists and objects inside each other.")
            match value:
                case str():
                    return self._text(value)
                case [_, *_]:
                    return self._sequence([part(each, depth + 1) for each in value])
                case {"any_of": [_, *_] as parts}:
                    return self._any_of([part(each, depth + 1) for each in parts])
                case {"repeat": each, "separator": str(separator)}:
                    return self._repeat(part(each, depth + 1), separator)
                case {"optional": each}:
                    return self._optional(part(each, depth + 1))
                case {"regex": str(pattern)}:
                    return self._regex(pattern)
                case {"token": str(text)}:
                    return self._token(self._tokens[text]) if text in self._tokens else self._text(text)
                case {"json_schema": schema}:
                    return self._schema(strict(schema))
            raise refuse(grammar, f"This is no part of a frame: {json.dumps(value):.60}.")

        return part(read_json(grammar), 0)


def expression_of(grammar: Grammar, tokens: Mapping[str, int]) -> Expression:
    """Return a frame as a part of a network. ``tokens`` are special tokens by their texts.

    Raise `InvalidRequestError` or `SchemaError` for a wrong one.
    """
    names = (f"{number} " for number in itertools.count())
    return Frames(  # type: ignore[no-any-return]
        text=lambda text: literal(text.encode()),
        sequence=lambda parts: sequence(*parts),
        any_of=lambda parts: choice(*parts),
        repeat=lambda part, separator: sequence(part, repeat(sequence(literal(separator.encode()), part))),
        optional=lambda part: repeat(part, 0, 1),
        regex=lambda pattern: parse(pattern, utf8, anchored=True),
        token=lambda token: literal(special_bytes(token)),
        schema=lambda schema: grammar_of(schema, next(names)),
        tokens=tokens,
    ).read(grammar)


def lark_of(
    grammar: Grammar, json_rule: Callable[[Any], str], regex: Callable[[str], str], tokens: Mapping[str, int]
) -> str:
    """Return a frame in the form of Lark.

    ``json_rule`` returns the body of the rule of a schema, ``regex`` a regular expression in the form of Lark.
    ``tokens`` are special tokens by their texts.
    """
    rules: list[str] = []

    def schema(value: Any) -> str:
        rules.append(json_rule(value))
        return f"json_{len(rules) - 1}"

    start = Frames(
        text=json.dumps,
        sequence=lambda parts: "(" + " ".join(parts) + ")",
        any_of=lambda parts: "(" + " | ".join(parts) + ")",
        repeat=lambda part, separator: f"({part} ({json.dumps(separator) if separator else ''} {part})*)",
        optional=lambda part: f"({part})?",
        regex=lambda pattern: f"/{regex(pattern)}/",
        token=lambda token: f"<[{token}]>",
        schema=schema,
        tokens=tokens,
    ).read(grammar)
    return "\n".join([f"start: {start}", *(f"json_{i}: {rule}" for i, rule in enumerate(rules))])
