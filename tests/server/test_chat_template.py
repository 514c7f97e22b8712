"""What extensions know of the model's chat template: it is compiled once for a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisgl.config import Config
from minisgl.plugins.http import HttpConfig
from minisgl.plugins.http.apis.chat_template import model_template
from minisgl.server.app import Api
from minisgl.server.extension import HttpExtension, load_extensions
from minisgl.tokenizer import chat

NAMED = """{%- for message in messages %}{%- if message.role == 'tool' %}
{{- '<' + message.name + ':' + message.content + '>' }}{%- elif message.role == 'user' and message.name %}
{{- '<user ' + message.name + ':' + message.content + '>' }}{%- else %}
{{- '<' + message.role + ':' + message.content + '>' }}{%- endif %}{%- endfor %}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    config = {"chat_template": NAMED, "eos_token": {"content": "</s>"}, "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def make_api(config: Config, extensions: Sequence[HttpExtension] = ()) -> Api:
    """Return what the routes have in common, without workers."""
    return Api(config, cast("Any", SimpleNamespace()), extensions)


def test_compiled_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All extensions of a server begin, and one of them compiles the template for all."""
    made: list[str] = []
    init = chat.ChatTemplate.__init__

    def count(self: chat.ChatTemplate, source: str, *rest: object) -> None:
        made.append(source)
        init(self, source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(chat.ChatTemplate, "__init__", count)
    config = Config(model=str(model), server=HttpConfig(extensions=("compatible", "tools")))
    extensions = load_extensions(config)
    api = make_api(config, extensions)
    for extension in extensions:
        extension.begin(api)
    assert made == [NAMED]


def test_names_that_are_read(model: Path) -> None:
    """A name is a hint in the messages of the roles that the template writes without names."""
    config = Config(model=str(model))
    template = model_template(make_api(config))
    assert template.special == ("</s>",)
    assert template.roles_without_name() == {"system", "assistant"}
