"""The model's chat template in the API server's process, which several extensions ask about. It is compiled once."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from minisgl.models.resolve import resolve_model
from minisgl.sampling_params import InvalidRequestError
from minisgl.server.app import Api
from minisgl.tokenizer.chat import ChatTemplate
from minisgl.tokenizer.tokenizer import SPECIAL_TOKENS, template_source
from minisgl.utils.json_file import read_json_if_present

ROLES = ("system", "user", "assistant", "tool")


class ModelTemplate(NamedTuple):
    """The template's source, empty if the model has none; the compiled template; the texts of all special tokens."""

    source: str = ""
    template: ChatTemplate | None = None
    special: tuple[str, ...] = ()

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads."""
        return frozenset() if self.template is None else self.template.variables

    def roles_without_name(self) -> frozenset[str]:
        """Return the roles whose messages have the same text with a ``name`` and without."""
        return frozenset(role for role in ROLES if self.template is not None and not _reads_name(self.template, role))


_KNOWN: WeakKeyDictionary[Api, ModelTemplate] = WeakKeyDictionary()


def model_template(api: Api) -> ModelTemplate:
    """Return the chat template of the server's model."""
    if api not in _KNOWN:
        _KNOWN[api] = _read(api.config.model)
    return _KNOWN[api]


def _read(model: str) -> ModelTemplate:
    path = resolve_model(model)
    if not path.is_dir():
        return ModelTemplate()
    config = read_json_if_present(path / "tokenizer_config.json")
    source = template_source(path, config) or ""
    texts = {name: _text_of(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    added = (config.get("added_tokens_decoder") or {}).values()
    special = {*texts.values(), *(token["content"] for token in added if token.get("special"))}
    return ModelTemplate(source, ChatTemplate(source, texts) if source else None, tuple(special))


def _text_of(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _reads_name(template: ChatTemplate, role: str) -> bool:
    """Return whether a name changes the text of a message, or no chat with such a message can be rendered."""
    message = {"role": role, "content": "x", **({"tool_call_id": "callabcde"} if role == "tool" else {})}
    for before in ([], [{"role": "user", "content": "x"}]):
        try:
            plain = template.render([*before, message], add_generation_prompt=False)
            return template.render([*before, {**message, "name": "y"}], add_generation_prompt=False) != plain
        except InvalidRequestError:
            continue
    return True
