"""Readers of tool calls and of reasoning: the same parts however the text is split, and no text is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.plugins.http.apis.answer import (
    AnswerReader,
    CallArguments,
    CallBegin,
    Content,
    Part,
    PlainReader,
    Reasoning,
)
from minisgl.plugins.http.tools import WithoutSpecial
from minisgl.plugins.reasoning_parser.think import ThinkReader
from minisgl.plugins.tokenizer.exact.template import CheckedTemplate
from minisgl.plugins.tool_parser.harmony import HarmonyReader
from minisgl.plugins.tool_parser.hermes import HermesParser, HermesReader
from minisgl.plugins.tool_parser.llama3 import Llama3Parser, Llama3Reader
from minisgl.plugins.tool_parser.mistral import MistralParser, MistralReader
from minisgl.plugins.tool_parser.qwen3_coder import Qwen3CoderReader, as_json

TOOLS = frozenset({"f", "get_weather"})
Readers = dict[str, Callable[[], AnswerReader]]
READERS: Readers = {
    "harmony": lambda: HarmonyReader(TOOLS, None, thinks=True),
    "harmony once": lambda: HarmonyReader(TOOLS, 1),
    "hermes": lambda: HermesReader(TOOLS, None),
    "hermes once": lambda: HermesReader(TOOLS, 1),
    "llama3": lambda: Llama3Reader(TOOLS, None),
    "mistral": lambda: MistralReader(TOOLS, None),
    "qwen3_coder": lambda: Qwen3CoderReader(SCHEMAS, None),
    "think": lambda: ThinkReader(False, HermesReader(TOOLS, None)),
    "think open": lambda: ThinkReader(True, PlainReader()),
    "special": lambda: WithoutSpecial(["<|eot|>", "<|eom|>"], PlainReader()),
}
SCHEMAS: dict[str, Any] = {
    "f": {"properties": {"a": {"type": "string"}, "b": {"type": "array"}, "c": {"type": ["integer", "null"]}}},
    "get_weather": {},
}
A = '<parameter=a>\nx\n"y" </p>\n</parameter>\n'
B, C = '<parameter=b>\n[1, "x"]\n</parameter>\n', "<parameter=c>\nNone\n</parameter>\n"
F = '{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": null}]}'
G = '{"name": "get_weather", "arguments": {}}'
CALL_F, CALL_G = ("f", ARGUMENTS), ("get_weather", "{}")


def merged(parts: Sequence[Part]) -> list[Any]:
    """Return parts as ("content", text), ("reasoning", text) and (name, arguments), with adjacent pieces joined."""
    found: list[Any] = []
    calls: dict[int, int] = {}
    for part in parts:
        match part:
            case CallBegin(index, _, name):
                calls[index] = len(found)
                found.append((name, ""))
            case CallArguments(index, text):
                assert text
                name, before = found[calls[index]]
                found[calls[index]] = name, before + text
            case Content(text) | Reasoning(text):
                assert text
                kind = "content" if isinstance(part, Content) else "reasoning"
                if found and found[-1][0] == kind:
                    found[-1] = kind, found[-1][1] + text
                else:
                    found.append((kind, text))
    assert list(calls) == list(range(len(calls)))
    return found


def read(name: str, *pieces: str) -> list[Any]:
    reader = READERS[name]()
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return merged(parts + reader.finish())


CASES: list[tuple[str, str, list[Any] | None]] = [
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
     [("reasoning", "Hm."), ("content", "Yes.")]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>", [("reasoning", "Hm."), CALL_F]),
    ("harmony", " to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>", [CALL_G]),
    ("harmony", "<|channel|>commentary to=functions.get_weather<|message|><|call|>", [CALL_G]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
     f"<|message|>{ARGUMENTS}", [("content", "I look."), CALL_F]),
    ("harmony", "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
     [("content", "One.\nTwo.")]),
    ("harmony", "<|channel|>commentary to=functions.other<|message|>{}<|call|>", [("content", "{}")]),
    ("harmony", "<|channel|>final<|message|>a < b <|e", [("content", "a < b <|e")]),
    ("harmony", "<|channel|>analysis<|message|>cut", [("reasoning", "cut")]),
    ("harmony", "<|channel|>fin", []),
    ("harmony", "No channel.", None),
    ("harmony", "assist", None),
    ("harmony", "to=" + "x" * 300, None),
    ("harmony once", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|message|>{ARGUMENTS}"
     "<|call|><|start|>assistant to=functions.f<|message|>{}<|call|>", [("content", "Hm."), CALL_F]),
    ("hermes", "Hello", [("content", "Hello")]),
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", [CALL_F]),
    ("hermes", f"I call.\n\n<tool_call>{F}</tool_call>\n", [("content", "I call."), CALL_F]),
    ("hermes", f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>", [CALL_F, CALL_G]),
    ("hermes", f"<tool_call>{F}</tool_call> Done.", [CALL_F, ("content", "Done.")]),
    ("hermes", f"<tool_call>\n{F}", [CALL_F]),
    ("hermes", f"<tool_call>\n{F}</tool", [CALL_F]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x')]),
    ("hermes", '<tool_call>{"arguments": {"é": 1}, "name": "f"}</tool_call>', [("f", '{"é": 1}')]),
    ("hermes once", f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>", [CALL_F]),
    # no calls: all of it is content
    ("hermes", "a < b <tool", [("content", "a < b <tool")]),
    ("hermes", "x <tool_call> no JSON", [("content", "x <tool_call> no JSON")]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}', None),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "f", "arg', None),
    ("hermes", f"<tool_call>?<tool_call>{F}", [("content", "<tool_call>?"), CALL_F]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ("llama3", '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}}',
     [("f", "{}"), ("f", '{"b": 2}')]),
    ("llama3", '{"name": "Bob", "age": 5}', None),
    ("llama3", '{"name": "f", "age": 5, "x": "' + "y" * 600 + '"}', None),
    ("llama3", 'See {"name": "f", "parameters": {}}', None),
    ("mistral", f"[TOOL_CALLS][{F}, {G}]", [CALL_F, CALL_G]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]', [CALL_F]),
    ("mistral", f"Now:[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]get_weather[ARGS]{{}}",
     [("content", "Now:"), CALL_F, CALL_G]),
    ("mistral", f"[TOOL_CALLS]f{ARGUMENTS}", [CALL_F]),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}", [CALL_F]),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}", None),
    ("mistral", "[TOOL_CALLS][5]", None),
    ("qwen3_coder", f"Now:\n<tool_call>\n<function=f>\n{A}{B}</function>\n</tool_call>\n<tool_call>\n"
     "<function=get_weather>\n</function>\n</tool_call>",
     [("content", "Now:"), ("f", '{"a": "x\\n\\"y\\" </p>", "b": [1, "x"]}'), ("get_weather", "{}")]),
    ("qwen3_coder", f"<tool_call><function=f>{C}</function></tool_call>", [("f", '{"c": null}')]),
    ("qwen3_coder", f"<tool_call><function=f>{C}{B}</tool_call> Done.",
     [("f", '{"c": null, "b": [1, "x"]}'), ("content", "Done.")]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\nno JSON\n</parameter>\n</function>\n</tool_call>",
     [("f", '{"b": "no JSON"}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=new>\n5\n</parameter>\n</function>\n</tool_call>",
     [("f", '{"new": 5}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\ncut", [("f", '{"a": "cut')]),
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>", None),
    ("qwen3_coder", f"<tool_call>{F}</tool_call>", None),
    ("qwen3_coder", "a <function=f>", None),
    ("think", "<think>\nHm.\n</think>\n\nYes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    ("think", "\n\n<think>\n\n</think>\n\nYes.", [("content", "Yes.")]),
    ("think", "Yes <think>", [("content", "Yes <think>")]),
    ("think", f"<think>a <tool_call></think><tool_call>{F}</tool_call>", [("reasoning", "a <tool_call>"), CALL_F]),
    ("think", "<think>cut </thi", [("reasoning", "cut </thi")]),
    ("think open", "Hm.\n</think>\nYes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    ("think open", "<think>Hm.</think>Yes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    ("think open", "Hm", [("reasoning", "Hm")]),
    ("special", "a<|eot|>b<|eo", [("content", "ab<|eo")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_whole_and_split(name: str, text: str, expected: list[Any] | None) -> None:
    """The parts are those of the whole text for each split into two and into single characters, and for some others."""
    want = [("content", text)] if expected is None else expected
    assert read(name, text) == want
    assert read(name, *text) == want
    for i in range(len(text) + 1):
        assert read(name, text[:i], text[i:]) == want, (text[:i], text[i:])
    if len(text) < 90:
        for i, j in itertools.combinations(range(len(text) + 1), 2):
            assert read(name, text[:i], text[i:j], text[j:]) == want, (text[:i], text[i:j], text[j:])


PIECES = ["<function=f>", "<parameter=", "a>", "b>", "</parameter>", "</function>", "<tool_call>",
          "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", F, G, "{",
          "}", '{"name": "f", "', 'arguments": {', 'parameters": {', "[", "]", ",", ";", " ", "\n", "f", "text", '"',
          "\\", "<|eot|>", "<|e", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "assistant", " to=functions.f",
          "analysis"]  # fmt: skip


@given(st.sampled_from(sorted(READERS)), st.lists(st.sampled_from(PIECES), max_size=9), st.data())
def test_any_text_split_anywhere(name: str, pieces: list[str], data: st.DataObject) -> None:
    """A text of the marks of all families in any order: no error, and the same parts for any split."""
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    assert read(name, *(text[a:b] for a, b in itertools.pairwise(bounds))) == read(name, text) == read(name, *text)


def test_a_long_call_without_a_name() -> None:
    """A call whose head is wrong is held back to its end, and is then content."""
    reader = HermesReader(TOOLS, None)
    text = '<tool_call>{"other": "' + "x" * 200_000
    assert [part for i in range(0, len(text), 50) for part in reader.feed(text[i : i + 50])] == []
    assert merged(reader.finish()) == [("content", text)]


# ---- templates ---------------------------------------------------------------------------------------------

HERMES_TEMPLATE = """{%- for message in messages %}
{%- if message.content %}{{- message.content + '\n' }}{%- endif %}
{%- for call in message.tool_calls or [] %}
    {%- if call.function %}{%- set call = call.function %}{%- endif %}
    {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>\n' }}
{%- endfor %}{%- endfor %}"""
LLAMA3_TEMPLATE = """{%- for message in messages %}{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}{%- endfor %}"""
MISTRAL_TEMPLATE = """{%- for message in messages %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}
    {{- out[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}
{%- endfor %}{{- ']' }}{%- endfor %}"""
TEKKEN_TEMPLATE = """{%- for message in messages %}{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}{%- endfor %}"""
QWEN3_CODER_TEMPLATE = """{%- for message in messages %}{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
    {{- '<parameter=' + name + '>\n' }}
    {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
    {{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}{%- endfor %}{%- endfor %}"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("name", "template", "most"),
    [
        ("hermes", HERMES_TEMPLATE, 3),
        ("llama3", LLAMA3_TEMPLATE, 1),
        ("mistral", MISTRAL_TEMPLATE, 3),
        ("mistral", TEKKEN_TEMPLATE, 3),
    ],
)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(max_size=5), VALUES)), min_size=1, max_size=3
    )
)
def test_calls_that_a_template_writes_are_read(
    name: str, template: str, most: int, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """A message with calls, as its template renders it, is read as the same calls."""
    calls = calls[:most]
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": each} for each in functions],
    }
    text = CheckedTemplate(template).render([message], add_generation_prompt=False)
    assert [(name, json.loads(arguments)) for name, arguments in read(name, *text)] == calls


@given(
    st.dictionaries(st.sampled_from("abcd"), VALUES | st.text(st.characters(exclude_categories=["Cs"]))),
    st.booleans(),
)
def test_arguments_of_qwen3_coder(arguments: dict[str, Any], is_typed: bool) -> None:
    """Texts of strings stay as they are, and other values are JSON, if the schema says which are which."""
    types = {str: "string", bool: "boolean", int: "integer", dict: "object", list: "array", type(None): "null"}
    schema = {"properties": {name: {"type": types[type(value)]} for name, value in arguments.items()}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "tool_calls": [call]}
    text = CheckedTemplate(QWEN3_CODER_TEMPLATE).render([message], add_generation_prompt=False)
    reader = Qwen3CoderReader({"f": schema if is_typed else {}}, None)
    ((name, found),) = merged([*reader.feed(text), *reader.finish()])
    assert (name, list(json.loads(found))) == ("f", list(arguments))
    for key, value in json.loads(found).items():
        given = arguments[key]
        if is_typed or not isinstance(given, str):
            assert value == given
        else:
            assert value in (given, as_json_value(given))


def as_json_value(text: str) -> Any:
    """Return the value that a text has if nothing says that it is a string."""
    return json.loads(as_json(text, frozenset()))


def test_ids() -> None:
    """Ids differ, and those of Mistral's family have the only form that its templates accept."""
    ids = set()
    for make in (READERS["hermes"], READERS["mistral"]):
        for _ in range(20):
            reader = make()
            text = f"[TOOL_CALLS][{F}]" if isinstance(reader, MistralReader) else f"<tool_call>{F}"
            begin = reader.feed(text)[0]
            assert isinstance(begin, CallBegin)
            ids.add(begin.id)
            if isinstance(reader, MistralReader):
                assert len(begin.id) == 9
                assert begin.id.isalnum()
            else:
                assert begin.id.startswith("call_")
    assert len(ids) == 40


@pytest.mark.parametrize("parser", [HermesParser(), Llama3Parser(), MistralParser(), MistralParser(True)])
def test_frames_are_read(parser: Any) -> None:
    """The shortest answer of a frame is one call, which the reader reads."""

    def shortest(frame: Any) -> str:
        match frame:
            case str():
                return frame
            case list():
                return "".join(map(shortest, frame))
            case {"any_of": parts}:
                return shortest(parts[-1])
            case {"repeat": part}:
                return shortest(part)
            case {"token": text}:
                return text
            case {"optional": _}:
                return ""
        return '{"a": 1}'

    for most in (1, None):
        frame = parser.frame([("f", {"type": "object"}), ("get_weather", {"type": "object"})], most)
        reader = parser.reader(TOOLS, most, True)
        assert merged([*reader.feed(shortest(frame)), *reader.finish()]) == [("get_weather", '{"a": 1}')]
