"""The tokenizer's files as transformers reads them: the same ids, the same text, the same chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from minisgl.config import ConfigError
from minisgl.core import InvalidRequestError
from minisgl.testing.checkpoints import _CHAT_TEMPLATE
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.chat import ChatTemplate

TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <world> & 'page' 🙂"},
    {"role": "assistant", "content": "  Yes.  "},
    {"role": "user", "content": "前缀?"},
]
LLAMA_LIKE = """{{- bos_token }}
{%- set date = strftime_now("%Y") if false else "2026" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start|>system " + date + "\\n" + system + "<|end|>" }}
{%- if tools is not none %}{{- tools|tojson(indent=2) }}{%- endif %}
{%- for message in messages %}
    {%- if loop.index0 == 99 %}{% break %}{% endif %}
    {%- if message.role == "assistant" %}{% generation %}
{{- message['content'] | trim + eos_token }}{% endgeneration %}
    {%- else %}{{- '<|start|>' + message['role'] + ' ' + message|tojson + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if thinking is defined and not thinking %}{{- 'no thoughts' }}{%- endif %}
{%- endif %}
"""
BLOCKS = """{% for message in messages %}
    {% if message.role == 'user' %}
U: {{ message.content }}
    {% endif %}
{% endfor %}{{ pad_token }}
"""
TEMPLATES = {"tiny": _CHAT_TEMPLATE, "llama_like": LLAMA_LIKE, "blocks": BLOCKS}


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    return tokenizer


def copy(checkpoint: Path, folder: Path) -> Path:
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("text", ["", "Hello world", " a  b\n\n", "<|bos|>Hello<|end|>", "🙂 前缀缓存 don't é"])
def test_ids_and_text_as_transformers(checkpoint: Path, text: str) -> None:
    ours, theirs = load(checkpoint), transformers.AutoTokenizer.from_pretrained(checkpoint)
    for special in (True, False):
        ids = ours.encode(text, special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("where", ["jinja file", "config", "named in config"])
def test_chat_as_transformers(checkpoint: Path, tmp_path: Path, template: str, where: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    theirs.chat_template = TEMPLATES[template]
    if where == "named in config":
        theirs.chat_template = {"default": TEMPLATES[template], "tool_use": "{{ 1 / 0 }}"}
    theirs.save_pretrained(tmp_path, save_jinja_files=where == "jinja file")
    if where == "named in config":
        assert "tool_use" in (tmp_path / "tokenizer_config.json").read_text()
    ours = load(tmp_path)
    for generate in (True, False):
        for extra in ({}, {"thinking": False}) if "thinking" in TEMPLATES[template] else ({},):
            ids = theirs.apply_chat_template(TURNS, add_generation_prompt=generate, return_dict=False, **extra)
            assert ours.chat(TURNS, generate, extra) == ids
            text = theirs.apply_chat_template(TURNS, add_generation_prompt=generate, tokenize=False, **extra)
            assert ours.render(TURNS, generate, extra) == text


def test_a_template_that_raises_is_a_refusal() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
    with pytest.raises(InvalidRequestError, match="Roles must alternate!") as refused:
        template.render(TURNS)
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[9].content }}", "{{ 1 // 0 }}", "{{ messages[0].content + 1 }}", "{{ ''.__class__.mro() }}"]
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source).render(TURNS)


def test_what_a_template_never_looks_at_is_refused_by_name() -> None:
    template = ChatTemplate(BLOCKS)
    with pytest.raises(InvalidRequestError, match="no variable 'thinking'") as refused:
        template.render(TURNS, extra={"thinking": True})
    assert refused.value.field == "chat_template_kwargs"
    with pytest.raises(InvalidRequestError, match="no place for a message's 'tool_calls'"):
        template.render([{"role": "assistant", "content": None, "tool_calls": [{}]}])


def test_no_template_is_a_refusal(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        load(checkpoint).chat(TURNS)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_dir(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("chat_template.jinja", "{% if %}", "not valid Jinja: line 1"),
    ],
)
def test_broken_files_are_errors_for_people(
    checkpoint: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = copy(checkpoint, tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        Tokenizer.from_dir(folder)
    assert str(tmp_path) in str(error.value)


def test_bytes_of_tokens_make_the_text(checkpoint: Path) -> None:
    tokenizer = load(checkpoint)
    text = "Hello 🙂 <|end|> don't 前缀"
    ids = tokenizer.encode(text, special=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode().strip() == text
    assert tokenizer.token_bytes(10**6) == b""
