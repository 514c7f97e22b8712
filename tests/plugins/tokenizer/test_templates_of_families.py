"""Chat templates with the forms of Gemma 3, gpt-oss, Qwen3.5, SmolLM3 and OLMo 3: the ids are those of transformers.

They are not the published templates, but have what is special in them: a system message that becomes part of another
turn, the date, thoughts that are left out of earlier turns, macros, tools and their calls in each family's form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken

from minisgl.core import InvalidRequestError
from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

from ...tokenizer.conftest import save
from .test_client_text import IM, THINK, build, special

GEMMA3 = """{{ bos_token }}
{%- set first = '' -%}{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}
    {%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Turns must alternate.') -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\\n' -}}
    {{- first if loop.first else '' -}}
    {%- if turn['content'] is string -%}{{ turn['content'] | trim }}
    {%- else -%}{%- for part in turn['content'] -%}
        {%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}
        {%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
    {%- endfor -%}{%- endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
GPT_OSS = """{%- macro kind(schema) -%}
    {%- if schema.type == 'array' -%}{{ kind(schema['items']) }}[]
    {%- elif schema.enum is defined -%}{{ '"' + schema.enum | join('" | "') + '"' }}
    {%- else -%}{{ {'integer': 'number', 'object': 'any'}.get(schema.type, schema.type) }}{%- endif -%}
{%- endmacro -%}
{%- macro listed(tools) -%}
    {{- '## functions\\n\\nnamespace functions {\\n\\n' -}}
    {%- for tool in tools -%}{%- set f = tool.function -%}
        {{- '// ' + f.description + '\\ntype ' + f.name + ' = (_: {\\n' -}}
        {%- for name, schema in f.parameters.properties.items() -%}
            {{- name + ('' if name in f.parameters.required or [] else '?') + ': ' -}}{{ kind(schema) }}{{- ',\\n' -}}
        {%- endfor -%}
        {{- '}) => any;\\n\\n' -}}
    {%- endfor -%}
    {{- '} // namespace functions' -}}
{%- endmacro -%}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' -}}
{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '\\n\\n' -}}
{{- '# Valid channels: analysis, commentary, final.' -}}
{%- if tools -%}{{- '\\nCalls go to the commentary channel.' -}}{%- endif -%}{{- '<|end|>' -}}
{%- set said = '' -%}{%- set turns = messages -%}
{%- if messages[0].role in ['developer', 'system'] -%}
    {%- set said = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{%- if said or tools -%}
    {{- '<|start|>developer<|message|>' -}}
    {%- if said -%}{{- '# Instructions\\n\\n' + said + '\\n\\n' -}}{%- endif -%}
    {%- if tools -%}{{- '# Tools\\n\\n' -}}{{ listed(tools) }}{%- endif -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for turn in turns -%}
    {%- if turn.role == 'assistant' and turn.tool_calls -%}
        {%- set call = turn.tool_calls[0].function -%}
        {%- set thought = turn.content or turn.thinking -%}
        {%- if thought -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' -}}{%- endif -%}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
        {{- call.arguments | tojson -}}{{- '<|call|>' -}}{%- set last.name = call.name -%}
    {%- elif turn.role == 'assistant' -%}
        {{- '<|start|>assistant<|channel|>final<|message|>' + turn.content -}}
        {{- '<|return|>' if loop.last else '<|end|>' -}}
    {%- elif turn.role == 'tool' -%}
        {%- if last.name is none -%}{{ raise_exception('An answer without a call.') }}{%- endif -%}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' -}}
        {{- turn.content | tojson -}}{{- '<|end|>' -}}
    {%- else -%}{{- '<|start|>user<|message|>' + turn.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""
QWEN35 = """{%- macro text(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}{%- if 'text' in part -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\\n</tools>' -}}
    {%- if messages[0].role == 'system' -%}{{- '\\n\\n' + text(messages[0].content) | trim -}}{%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + text(messages[0].content) | trim + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set asked = namespace(at=-1) -%}
{%- for turn in messages[::-1] -%}
    {%- if turn.role == 'user' and asked.at < 0 -%}
        {%- set asked.at = messages | length - 1 - loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for turn in messages -%}
    {%- set content = text(turn.content) | trim -%}
    {%- if turn.role == 'user' -%}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
    {%- elif turn.role == 'assistant' -%}
        {%- set thought = turn.reasoning_content if turn.reasoning_content is string else '' -%}
        {%- if not thought and '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
            {%- set content = content.split('</think>')[-1] | trim -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if loop.index0 > asked.at -%}{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' -}}{%- endif -%}
        {{- content -}}
        {%- for call in turn.tool_calls or [] -%}
            {{- ('\\n\\n' if content else '') + '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
            {%- for name, value in call.function.arguments | items -%}
                {{- '<parameter=' + name + '>\\n' -}}
                {{- value | string if value is string else value | tojson -}}{{- '\\n</parameter>\\n' -}}
            {%- endfor -%}
            {{- '</function>\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif turn.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n<think>\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
SMOLLM3 = """{%- set thinks = enable_thinking if enable_thinking is defined else true -%}
{%- set said = '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set said = messages[0].content -%}
    {%- if '/no_think' in said -%}{%- set thinks = false -%}
    {%- elif '/think' in said -%}{%- set thinks = true -%}{%- endif -%}
    {%- set said = said.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
{{- '<|im_start|>system\\n## Metadata\\n\\nToday: ' + strftime_now('%d %B %Y') -}}
{{- '\\nReasoning Mode: ' + ('/think' if thinks else '/no_think') + '\\n\\n## Instructions\\n\\n' + said + '\\n\\n' -}}
{%- if tools -%}
    {{- '### Tools\\n\\n<tools>\\n' -}}
    {%- for tool in tools -%}{{- tool.function | string + '\\n' -}}{%- endfor -%}{{- '</tools>\\n' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for turn in messages -%}
    {%- set content = turn.content if turn.content is string else '' -%}
    {%- if turn.role == 'user' -%}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
    {%- elif turn.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') + content.lstrip('\\n') -}}
        {%- for call in turn.tool_calls or [] -%}
            {%- set asked = {'name': call.function.name, 'arguments': call.function.arguments} -%}
            {{- '<tool_call>' + asked | tojson + '</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif turn.role == 'tool' -%}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') -}}
{%- endif -%}"""
OLMO3 = """{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou call functions.<functions>' -}}
    {{- (tools or []) | tojson -}}{{- '</functions><|im_end|>\\n' -}}
{%- endif -%}
{%- for turn in messages -%}
    {%- if turn.role == 'system' -%}
        {{- '<|im_start|>system\\n' + turn.content -}}
        {%- if tools -%}{{- '<functions>' -}}{{- tools | tojson -}}{{- '</functions>' -}}{%- endif -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif turn.role == 'user' -%}{{- '<|im_start|>user\\n' + turn.content + '<|im_end|>\\n' -}}
    {%- elif turn.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}{%- if turn.content -%}{{- turn.content -}}{%- endif -%}
        {%- if turn.tool_calls -%}
            {{- '<function_calls>' -}}
            {%- for call in turn.tool_calls -%}
                {{- call.function.name + '(' -}}
                {%- for name, value in call.function.arguments | dictsort -%}
                    {{- name + '=' -}}{{- value | tojson -}}{{- '' if loop.last else ', ' -}}
                {%- endfor -%}
                {{- ')' + ('' if loop.last else '\\n') -}}
            {%- endfor -%}
            {{- '</function_calls>' -}}
        {%- endif -%}
        {{- eos_token if loop.last and not add_generation_prompt else '<|im_end|>\\n' -}}
    {%- elif turn.role == 'tool' -%}{{- '<|im_start|>environment\\n' + turn.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

HARMONY = special(*(f"<|{name}|>" for name in ("start", "message", "end", "channel", "call", "return")))
FAMILIES: dict[str, tuple[str, str, list[AddedToken], dict[str, Any]]] = {
    "Gemma 3": ("replace", GEMMA3, special("<|bos|>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"), {}),
    "gpt-oss": ("byte_level", GPT_OSS, HARMONY, {"reasoning_effort": "high"}),
    "Qwen3.5": ("byte_level", QWEN35, IM + THINK, {"enable_thinking": False}),
    "SmolLM3": ("byte_level", SMOLLM3, IM + THINK, {"enable_thinking": False}),
    "OLMo 3": ("byte_level", OLMO3, [*IM, *special("<|eos|>")], {}),
}
"""Family → kind of tokenizer, template, added tokens, and variables that a request may set."""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "rain", "description": "Will it?", "parameters": PARAMETERS}}
]
CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": {"city": "Köln", "days": 2}}}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
USER: dict[str, Any] = {"role": "user", "content": " Rain in Köln? 🙂 "}
ASKED: list[dict[str, Any]] = [SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TURNS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "Yes,\n a < b."},
    {"role": "user", "content": "And now?"},
]


THOUGHT: dict[str, Any] = {**ASKED[2], "reasoning_content": "Ask."}


def load(family: str, folder: Path) -> tuple[ExactTokenizer, Any]:
    """Return the tokenizer of a family, and that of transformers."""
    kind, template, added, _ = FAMILIES[family]
    save(build(kind, added), folder, template)
    ours = ExactTokenizer.from_dir(folder)
    assert ours is not None
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_have_the_ids_of_transformers(family: str, tmp_path: Path) -> None:
    """Turns with and without a system message, in a request's own mode, with tools, a call and its result."""
    ours, theirs = load(family, tmp_path)
    variables = FAMILIES[family][3]
    chats: list[tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]] = [
        ([USER], {}, []),
        (TURNS, {}, []),
        ([SYSTEM, *TURNS], {}, []),
    ]
    if variables:
        chats.append(([SYSTEM, *TURNS], variables, []))
    if family != "Gemma 3":
        called = [*ASKED, {"role": "tool", "content": "2 mm", "tool_call_id": "1"}]
        chats += [([USER], {}, TOOLS), (called, {}, TOOLS), ([*called, *TURNS[1:]], variables, TOOLS)]
    if family == "SmolLM3":  # its system message may say how the model answers, and the template takes the word away
        chats.append(([{**SYSTEM, "content": "Be short. /no_think"}, *TURNS], {}, []))
    if family == "gpt-oss":
        chats.append(([SYSTEM, USER, THOUGHT, called[-1]], {}, TOOLS))
    seen = set()
    for messages, kwargs, tools in chats:
        got = ours.chat(messages, True, kwargs, tools)
        known = [{**turn, "thinking": turn.get("reasoning_content", "")} for turn in messages]  # the template's name
        options = {"add_generation_prompt": True, "return_dict": False, "tools": tools or None, **kwargs}
        assert got == theirs.apply_chat_template(known, **options)
        seen.add(tuple(got))
    assert len(seen) == len(chats)


def test_gemma_refuses_turns_that_do_not_alternate(tmp_path: Path) -> None:
    ours, _ = load("Gemma 3", tmp_path)
    with pytest.raises(InvalidRequestError, match="Turns must alternate"):
        ours.chat([USER, USER])
