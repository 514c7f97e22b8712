"""`tool_parser=qwen3_coder`: calls of Qwen3-Coder, whose arguments are texts between marks, and no JSON.

Such a call is ``<tool_call>``, ``<function=NAME>``, for each argument ``<parameter=NAME>``, its text and
``</parameter>``, and ``</function>``, ``</tool_call>``, each on lines of their own. The schema of the tool says
whether a text is a string or JSON. Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.hooks import hookimpl
from minisgl.plugins.http.apis.answer import partial_length
from minisgl.plugins.tool_parser import ToolParser
from minisgl.plugins.tool_parser.calls import one_or_more
from minisgl.plugins.tool_parser.hermes import CLOSER, OPENER, HermesReader
from minisgl.sampling_params import InvalidRequestError, shorten

FUNCTION, PARAMETER = "<function=", "<parameter="
END, END_FUNCTION = "</parameter>", "</function>"
MAX_NAME = 256
"""The largest number of characters of the name of a function or a parameter."""
MAX_REFERENCES = 16
"""The largest number of references that lead from one to the next."""
TEXT = r"(?:[^<]|<(?:<|/<)*(?:[^</]|/[^<p]))*"
"""The texts of a forced call's string: all without ``</p``, which begins the mark of the end."""
TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), dict: ("object",),
    list: ("array",), type(None): ("null",),
}  # fmt: skip
"""Type of a value → its types in JSON schema."""


@dataclass
class Qwen3Coder:
    """Calls as ``<function=NAME>`` with ``<parameter=NAME>``, inside ``<tool_call>`` and ``</tool_call>``."""

    def build(self) -> ToolParser:
        return Qwen3CoderParser()


def matches(template: str) -> bool:
    """Return whether a chat template writes calls in this form."""
    return FUNCTION in template and PARAMETER in template


class Qwen3CoderParser:
    """Reads and describes these calls."""

    special: Sequence[str] = ()

    def reader(self, tools: Mapping[str, Any], most: int | None, forced: bool) -> Qwen3CoderReader:
        return Qwen3CoderReader(tools, most)

    def frame(self, tools: Sequence[tuple[str, Any]], most: int | None) -> Any:
        calls = [
            [f"{OPENER}\n{FUNCTION}{name}>\n", *_parameters(resolved(schema, schema)), f"{END_FUNCTION}\n{CLOSER}"]
            for name, schema in tools
        ]
        return one_or_more(calls, most, "\n")


class Qwen3CoderReader(HermesReader):
    """Writes the arguments as JSON while they arrive: strings in pieces, other values when they are complete.

    ``tools`` has the schema of each tool's arguments.
    """

    def __init__(self, tools: Mapping[str, Any], most: int | None):
        super().__init__(tools, most)
        self._schemas, self._schema = tools, dict[str, Any]()
        self._num_arguments, self._types, self._is_first = 0, frozenset[str](), True

    def _between(self) -> bool:
        """Read the white space before the function."""
        self._skip_space()
        if self._buffer.startswith(FUNCTION):
            self._state = self._function
            return True
        return not FUNCTION.startswith(self._buffer) and self._no_call()

    def _function(self) -> bool:
        name = self._name(FUNCTION)
        if name is None:
            return len(self._buffer) > MAX_NAME and self._no_call()
        if name not in self._schemas:
            return self._no_call()
        schema = self._schemas[name]
        self._begin(name)
        self._name(FUNCTION, take=True)
        self._schema, self._num_arguments = resolved(schema, schema), 0
        self._add_arguments("{")
        self._state = self._next
        return True

    def _name(self, mark: str, take: bool = False) -> str | None:
        """Return the name after ``mark``, at which the buffer begins; None: it is not complete."""
        name, end, rest = self._buffer.removeprefix(mark).partition(">")
        if end and take:
            self._buffer = rest
        return name.strip() if end else None

    def _next(self) -> bool:
        """Read up to the next argument, or the end of the function. Other text is left out."""
        marks = (PARAMETER, END_FUNCTION, CLOSER)
        places = [at for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if not places:
            kept = partial_length(self._buffer, *marks)
            self._buffer = self._buffer[len(self._buffer) - kept :]
            return False
        self._buffer = self._buffer[min(places) :]
        if not self._buffer.startswith(PARAMETER):
            self._buffer = self._buffer.removeprefix(END_FUNCTION)
            self._add_arguments("}")
            self._state = self._after
            return True
        name = self._name(PARAMETER, take=True)
        if name is None:
            if len(self._buffer) > MAX_NAME:
                self._buffer = self._buffer[len(PARAMETER) :]
                return True
            return False
        self._types = types_of(_properties(self._schema).get(name, {}), self._schema)
        self._add_arguments(f"{', ' if self._num_arguments else ''}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._is_first, self._state = True, self._value
        return True

    def _value(self) -> bool:
        """Read the text of an argument, without the line breaks at its beginning and its end."""
        if self._is_first and self._buffer[:1] == "\n":
            self._buffer = self._buffer[1:]
        is_text = self._types == {"string"}
        if self._is_first and is_text:
            self._add_arguments('"')
        self._is_first = False
        at = self._buffer.find(END)
        if at < 0 and not is_text:
            return False
        end = at if at >= 0 else len(self._buffer) - partial_length(self._buffer, "\n" + END, END)
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        text = text.removesuffix("\n") if at >= 0 else text
        if is_text:
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if at >= 0 else ""))
        elif at >= 0:
            self._add_arguments(as_json(text, self._types))
        if at >= 0:
            self._buffer, self._state = self._buffer[len(END) :], self._next
        return at >= 0


# ---- schemas -----------------------------------------------------------------------------------------------


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Return the schema to which a reference into ``root`` leads; an empty one if it leads nowhere."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        if "$ref" not in schema:
            return schema
        found: Any = root
        for name in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        schema = found
    return {}


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Return the types of the values of a schema, or none if it does not say."""
    schema = resolved(schema, root)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(TYPES[type(value)][0] for value in values if type(value) in TYPES)
    if isinstance(schema.get("type"), str | list):
        return frozenset([schema["type"]] if isinstance(schema["type"], str) else map(str, schema["type"]))
    options = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(options, list) or depth > MAX_REFERENCES:
        return frozenset()
    found = [types_of(option, root, depth + 1) for option in options]
    return frozenset().union(*found) if all(found) else frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the text of an argument as JSON: a value of one of ``types``, or otherwise a string."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)  # the template writes them so
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        value = ""
    if not isinstance(value, str) and (not types or not types.isdisjoint(TYPES[type(value)])):
        return word.strip()
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


# ---- forced calls ------------------------------------------------------------------------------------------


def _parameters(schema: dict[str, Any]) -> list[Any]:
    """Return the frames of the arguments of a tool, in the order of its schema."""
    combined = sorted({"anyOf", "oneOf", "allOf", "enum", "const", "patternProperties"} & schema.keys())
    if combined:
        raise _unsupported(f"{combined[0]} of the arguments themselves")
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    frames = []
    for name, value in _properties(schema).items():
        frame = [f"{PARAMETER}{name}>\n", _value_frame(value, schema)]
        frames.append(frame if name in needed else {"optional": frame})
    return frames


def _value_frame(schema: Any, root: dict[str, Any]) -> Any:
    """Return the frame of the text of an argument, with the mark of its end."""
    schema, end = resolved(schema, root), f"\n{END}\n"
    types = types_of(schema, root)
    if not types:
        return {"regex": TEXT + end}
    if "string" not in types:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return [{"json_schema": {**definitions, **schema}}, end]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return {"any_of": [[each if isinstance(each, str) else json.dumps(each), end] for each in values]}
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return {"any_of": [_value_frame(option, root) for option in options]}
    if len(types) > 1:
        return {"any_of": [_value_frame({**schema, "type": each}, root) for each in schema["type"]]}
    for name in ("pattern", "format"):
        if name in schema:
            raise _unsupported(f"{name} of a string")
    if "minLength" in schema or "maxLength" in schema:
        return {"regex": f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}{end}"}
    return {"regex": TEXT + end}


def _unsupported(what: str) -> InvalidRequestError:
    message = f"A forced call in the form of this model can't have {shorten(what)}: let tool_choice be auto."
    return InvalidRequestError("tools", message, "unsupported_grammar")


@hookimpl
def minisgl_configs() -> Any:
    yield "tool_parser", "qwen3_coder", Qwen3Coder
