"""Grammars and answers that are new in each run: objects of random JSON schemas, and sentences of random regexes.

Lab `grammar` measures its number to beat on them. Knows no plugin.
"""

from __future__ import annotations

import json
import random
from typing import Any

__all__ = ["unseen_answers"]


def _words(text: str) -> list[str]:
    return text.split("|")


_NAMES = _words("name|city|age|term|pages|title|author|year|price|count|open|room|day|street|items|note|colour|kind|to")
_WORDS = _words(
    "KV cache|page|prefix|prefill|decode|radix tree|scheduler|token|batch|London|Oslo|Berlin|red|green|north door|"
    "room 12|chess club|library|Maria|Grace"
)
_BEGINNINGS = _words("The library|A page|The chess club|Every prefix|Our museum|The last step")


def unseen_answers(rng: random.Random, count: int = 16) -> list[tuple[Any, str, str]]:
    """Return ``count`` tuples: the kind of a grammar, its text, and an answer. Every fourth grammar is a regex."""
    found: list[tuple[Any, str, str]] = []
    for i in range(count):
        if i % 4 == 3:
            one, other = rng.sample(_BEGINNINGS, 2)
            regex = f"({one}|{other}) (opens|closes) at (1?[0-9]|2[0-4]):(00|15|30|45), and everyone (waits|leaves)\\."
            time = f"{rng.randint(0, 24)}:{rng.choice(['00', '15', '30', '45'])}"
            words = rng.choice([one, other]), rng.choice(["opens", "closes"]), rng.choice(["waits", "leaves"])
            found.append(("regex", regex, f"{words[0]} {words[1]} at {time}, and everyone {words[2]}."))
        else:
            schema, value = _thing(rng)
            found.append(("json_schema", json.dumps(schema), json.dumps(value)))
    return found


def _thing(rng: random.Random, depth: int = 0) -> tuple[Any, Any]:
    """Return the schema of an object, all of whose properties are required, and such an object."""
    parts = {name: _part(rng, depth) for name in rng.sample(_NAMES, rng.randint(2, 4))}
    properties = {name: schema for name, (schema, _) in parts.items()}
    schema = {"type": "object", "properties": properties, "required": list(parts)}
    return schema, {name: value for name, (_, value) in parts.items()}


def _part(rng: random.Random, depth: int) -> tuple[Any, Any]:
    """Return the schema of a value, and a value."""
    kind = rng.choice(["enum", "integer", "boolean", "string", "null", *["object", "array"] * (depth < 2)])
    if kind == "enum":
        words = rng.sample(_WORDS, rng.randint(2, 4))
        return {"enum": words}, rng.choice(words)
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": 99}, rng.randint(0, 99)
    if kind == "boolean":
        return {"type": "boolean"}, rng.random() < 0.5
    if kind == "string":
        return {"type": "string", "maxLength": 12}, rng.choice(_WORDS)
    if kind == "null":
        digit = {"type": "integer", "minimum": 0, "maximum": 9}
        return {"anyOf": [digit, {"type": "null"}]}, rng.choice([None, rng.randint(0, 9)])
    if kind == "object":
        return _thing(rng, depth + 1)
    schema, value = _part(rng, depth + 1)
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}, [value] * rng.randint(1, 3)
