"""The parsers that ``auto`` chooses for templates, in the words in which public models have them."""

from __future__ import annotations

import pytest

from minisgl.plugin_manager.manager import PluginManager

TOOLS = [
    ("harmony", """{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}"""),
    ("hermes", r"""{{- "return a json object\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n" }}"""),
    ("hermes", """{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}"""),
    ("llama3", """{{- 'Respond in the format {"name": function name, "parameters": dictionary' }}<|eot_id|>"""),
    ("llama3", """{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""),
    ("mistral", """{{- "[TOOL_CALLS] [" }}"""),
    ("qwen3_coder", """{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' }}"""),
    ("none", """{{- '<tool_call>' + tc.name }}{% for k, v in tc.arguments.items() %}<arg_key>{{ k }}"""),  # GLM
    ("none", "{{ message.content }}"),
]  # fmt: skip
REASONING = [
    ("think", "{{- '<think>\\n\\n</think>\\n\\n' }}", False),
    ("deepseek_r1", "{% set content = content.split('</think>')[-1] %}", True),
    ("none", "{{ message.content }}", False),
]


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load(light=True)


@pytest.mark.parametrize(("name", "template"), TOOLS)
def test_tool_parser(manager: PluginManager, name: str, template: str) -> None:
    chosen = manager.build("tool_parser", manager.make("tool_parser", "auto"), template=template)
    named = manager.build("tool_parser", manager.make("tool_parser", name), template=template)
    assert type(chosen) is type(named)


@pytest.mark.parametrize(("name", "template", "is_open"), REASONING)
def test_reasoning_parser(manager: PluginManager, name: str, template: str, is_open: bool) -> None:
    """Old templates of DeepSeek R1 do not end with ``<think>``, but its answers begin within the reasoning."""
    chosen = manager.build("reasoning_parser", manager.make("reasoning_parser", "auto"), template=template)
    named = manager.build("reasoning_parser", manager.make("reasoning_parser", name), template=template)
    assert type(chosen) is type(named)
    if chosen is not None:
        assert chosen.is_open("<|assistant|>") == is_open
        assert chosen.is_open("<|assistant|><think>\n")
        assert not chosen.is_open("<think>\n\n</think>\n\n")
        assert chosen.is_closed("<think>\n\n</think>\n\n")
