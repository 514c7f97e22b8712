"""The tokenizer gives the same token ids, text and rendered chats as transformers does for the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from minisgl.config import ConfigError
from minisgl.core import InvalidRequestError
from minisgl.plugins.tokenizer.exact.template import ChatTemplate
from minisgl.testing.checkpoints import _CHAT_TEMPLATE
from minisgl.tokenizer import Tokenizer

MESSAGES: list[dict[str, Any]] = [
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
    {% else %}
{{ message.content }}
    {% endif %}
{% endfor %}{{ pad_token }}
"""
TEMPLATES = {"tiny": _CHAT_TEMPLATE, "llama_like": LLAMA_LIKE, "blocks": BLOCKS}


def load(kind: type[Tokenizer], folder: Path) -> Tokenizer:
    tokenizer = kind.read(folder)
    assert tokenizer is not None
    return tokenizer


def copy(checkpoint: Path, folder: Path) -> Path:
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("text", ["", "Hello world", " a  b\n\n", "<|bos|>Hello<|end|>", "🙂 前缀缓存 don't é"])
def test_encode_decode_match_transformers(kind: type[Tokenizer], checkpoint: Path, text: str) -> None:
    ours, theirs = load(kind, checkpoint), transformers.AutoTokenizer.from_pretrained(checkpoint)
    for add_special_tokens in (True, False):
        ids = ours.encode(text, add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("where", ["jinja file", "config", "named in config"])
def test_chat_matches_transformers(
    kind: type[Tokenizer], checkpoint: Path, tmp_path: Path, template: str, where: str
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    theirs.chat_template = TEMPLATES[template]
    if where == "named in config":
        theirs.chat_template = {"default": TEMPLATES[template], "tool_use": "{{ 1 / 0 }}"}
    theirs.save_pretrained(tmp_path, save_jinja_files=where == "jinja file")
    if where == "named in config":
        assert "tool_use" in (tmp_path / "tokenizer_config.json").read_text()
    ours = load(kind, tmp_path)
    for prompt in (True, False):
        for kwargs in ({}, {"thinking": False}) if "thinking" in TEMPLATES[template] else ({},):
            ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False, **kwargs)
            assert ours.chat(MESSAGES, prompt, kwargs) == ids
            text = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False, **kwargs)
            assert ours.render(MESSAGES, prompt, kwargs).text == text


def test_template_exception_is_refusal() -> None:
    """An error that the template itself raises is an `InvalidRequestError` with the template's message."""
    template = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
    with pytest.raises(InvalidRequestError, match="Roles must alternate!") as refused:
        template.render(MESSAGES)
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[9].content }}", "{{ 1 // 0 }}", "{{ messages[0].content + 1 }}", "{{ ''.__class__.mro() }}"]
)
def test_template_failure_is_refusal(source: str) -> None:
    """A template that fails, or that tries to leave Jinja's sandbox, is an `InvalidRequestError`."""
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source).render(MESSAGES)


def test_missing_template_is_refusal(kind: type[Tokenizer], checkpoint: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        load(kind, checkpoint).chat(MESSAGES)


def test_directory_without_tokenizer(kind: type[Tokenizer], tmp_path: Path) -> None:
    assert kind.read(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "can't be read as JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("chat_template.jinja", "{% if %}", "not valid Jinja: line 1"),
    ],
)
def test_broken_files_raise_config_error(
    kind: type[Tokenizer], checkpoint: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = copy(checkpoint, tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        kind.read(folder)
    assert str(tmp_path) in str(error.value)


def test_token_bytes_join_to_text(kind: type[Tokenizer], checkpoint: Path) -> None:
    tokenizer = load(kind, checkpoint)
    text = "Hello 🙂 <|end|> don't 前缀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode().strip() == text
    assert tokenizer.token_bytes(10**6) == b""
