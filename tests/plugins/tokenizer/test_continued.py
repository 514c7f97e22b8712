"""``continue_final_message``: the prompt ends with the last message, with the text that transformers gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from minisgl.core import InvalidRequestError
from minisgl.message import ChatPrompt
from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

from ...tokenizer.conftest import byte_level, save, sentencepiece_like

TEMPLATES = {
    "plain": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eos|>\n{% endfor %}",
    "trimming": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<|eos|>{% endfor %}",
    "think": "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1].lstrip('\n') }}\n{% endfor %}",
}
USER = {"role": "user", "content": "What is CONTINUE_FINAL_MESSAGE_TAG?"}
TEXTS = ["It is", "It is ", '  {"term": "', "a\n\n", "<think>x</think>\n\nYes,", "<|eos|>", "é🙂"]


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece_like"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save(byte_level() if request.param == "byte_level" else sentencepiece_like(), folder)


def load(folder: Path) -> ExactTokenizer:
    tokenizer = ExactTokenizer.read(folder)
    assert tokenizer is not None
    return tokenizer


def prompt_of(messages: list[Any], **more: Any) -> ChatPrompt:
    return ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True, **more)


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_of_transformers(checkpoint: Path, tmp_path: Path, template: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    theirs.chat_template = TEMPLATES[template]
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    for text in TEXTS:
        messages = [USER, {"role": "assistant", "content": text}]
        try:
            want = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
        except ValueError:  # the template changes the text
            with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
                ours.render_prompt(prompt_of(messages))
            continue
        found = ours.render_prompt(prompt_of(messages))
        assert found.text == want
        if "<|eos|>" not in text:
            assert ours.encode_chat(found) == theirs(want, add_special_tokens=False).input_ids


def test_special_tokens_in_the_message_stay_text(checkpoint: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    theirs.chat_template = TEMPLATES["plain"]
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    end = ours.raw.token_to_id("<|eos|>")
    ids = ours.encode_chat(ours.render_prompt(prompt_of([USER, {"role": "assistant", "content": "a<|eos|>b"}])))
    assert ids.count(end) == 1  # that of the user's message


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_no_text_to_continue(checkpoint: Path, content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
        load(checkpoint).render_prompt(prompt_of([USER, {"role": "assistant", "content": content}]))


def test_a_template_that_drops_the_message(checkpoint: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    theirs.chat_template = "{{ messages[0].content }}"
    theirs.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
        load(tmp_path).render_prompt(prompt_of([USER, {"role": "assistant", "content": "x"}]))


def test_messages_with_only_tool_calls(checkpoint: Path, tmp_path: Path) -> None:
    """A template that needs a text gets an empty one, also by `Tokenizer.chat`, which `LLM.chat` calls."""
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    theirs.chat_template = (
        "{% for m in messages %}{{ m.content.strip() }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    theirs.save_pretrained(tmp_path)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ours = load(tmp_path)
    assert ours.decode(ours.chat([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])).endswith(
        "add{}"
    )
