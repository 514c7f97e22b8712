"""The parameters of structured output: OpenAI's ``response_format``, and the names of vLLM and SGLang.

All become the one parameter ``grammar`` of the core. Sources: the API reference of OpenAI, and what vLLM and SGLang
document as structured outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.parameters import FullGenerateRequest, decode_field
from minisgl.sampling_params import Grammar, shorten
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension

MAX_BYTES = 60 << 10
"""The largest size of a parameter."""
MAX_ENCODED = 1 << 16
"""The largest size of the ``grammar`` that it becomes, in which quotes are escaped: the limit of `bounds`."""
ANY_OBJECT = '{"type": "object"}'


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return AnswerFormat()


class AnswerFormat(HttpExtension):
    """Replaces the parameters of other APIs by ``grammar``."""

    def check_fields(self, kind: type, fields: dict[str, msgspec.Raw]) -> None:
        if not issubclass(kind, FullGenerateRequest):
            return
        found: list[Grammar] = []
        for name in [name for name in fields if name in READERS]:
            raw = fields.pop(name)
            if len(raw) > MAX_BYTES:
                raise _wrong(name, f"{name} is larger than {MAX_BYTES} bytes.")
            value = decode_field(name, raw)
            grammar = None if value is None else READERS[name](name, value)
            found += [grammar] if grammar is not None else []
        if len(found) > 1 or (found and "grammar" in fields):
            other = found[1].field if len(found) > 1 else "grammar"
            raise _wrong(other, f"{found[0].field} and {other} both say what the answer may be: give one of them.")
        if found:
            encoded = msgspec.json.encode(found[0])
            if len(encoded) > MAX_ENCODED:
                raise _wrong(found[0].field, f"{found[0].field} is larger than {MAX_ENCODED} bytes as a JSON string.")
            fields["grammar"] = msgspec.Raw(encoded)


def _wrong(name: str, message: str) -> ApiError:
    return ApiError(400, shorten(message, 200), name, "invalid_value")


def _json(name: str, value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise _wrong(name, f"{name} has too many values inside each other.") from None


def _schema(name: str, value: Any) -> Grammar:
    """Return the grammar of a JSON schema, which may be JSON in a string."""
    if not isinstance(value, str | dict | bool):
        raise _wrong(name, f"{name} must be a JSON schema.")
    return Grammar("json_schema", value if isinstance(value, str) else _json(name, value), name)


def _text(kind: Any) -> Callable[[str, Any], Grammar]:
    def read(name: str, value: Any) -> Grammar:
        if not isinstance(value, str):
            raise _wrong(name, f"{name} must be a string.")
        return Grammar(kind, value, name)

    return read


def _choices(name: str, value: Any) -> Grammar:
    if not isinstance(value, list):
        raise _wrong(name, f"{name} must be a list of strings.")
    return Grammar("choice", _json(name, value), name)


def _response_format(name: str, value: Any) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar("json_schema", ANY_OBJECT, name)
        case "json_schema":
            given = value.get("json_schema")
            if not isinstance(given, dict):
                raise _wrong(name, f"{name}.json_schema must be an object with the entry schema.")
            return _schema(name, given.get("schema", {"type": "object"}))
    raise _wrong(name, f"{name}.type must be text, json_object or json_schema.")


def _structured_outputs(name: str, value: Any) -> Grammar | None:
    """Read vLLM's ``structured_outputs``. At most one of its entries is set: it says which answers are allowed."""
    if not isinstance(value, dict):
        raise _wrong(name, f"{name} must be an object.")
    given = {key: each for key, each in value.items() if each not in (None, False)}
    unknown = [key for key in given if key not in OUTPUT_READERS and key != "json_object"]
    if unknown:
        raise _wrong(name, f"{name}.{unknown[0]} is not supported by this server.")
    if len(given) > 1:
        raise _wrong(name, f"{name} has {' and '.join(sorted(given))}: give one of them.")
    for key, each in given.items():
        if key == "json_object":
            return Grammar("json_schema", ANY_OBJECT, name)
        return OUTPUT_READERS[key](name, each)
    return None


OUTPUT_READERS: Mapping[str, Callable[[str, Any], Grammar]] = MappingProxyType(
    {"json": _schema, "regex": _text("regex"), "choice": _choices, "grammar": _text("lark")}
)
"""Entry of vLLM's ``structured_outputs`` → the function that reads it."""
READERS: Mapping[str, Callable[[str, Any], Grammar | None]] = MappingProxyType(
    {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
        "guided_json": _schema,
        "guided_regex": _text("regex"),
        "guided_choice": _choices,
        "guided_grammar": _text("lark"),
        "json_schema": _schema,
        "regex": _text("regex"),
        "ebnf": _text("lark"),
    }
)
"""Parameter → the function that reads it: OpenAI's, vLLM's new and old ones, SGLang's."""
