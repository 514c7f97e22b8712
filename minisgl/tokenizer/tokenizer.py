"""A model's tokenizer: text to token ids and back, with the files that Hugging Face's tokenizers write.

Reads ``tokenizer.json`` (by the ``tokenizers`` library), ``tokenizer_config.json`` and the chat template. Knows a
directory, and nothing of requests.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minisgl.config import ConfigError
from minisgl.core import InvalidRequestError
from minisgl.tokenizer.chat import ChatTemplate

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Encodes, decodes and renders chats. ``raw`` is the ``tokenizers.Tokenizer`` underneath."""

    def __init__(self, raw: tokenizers.Tokenizer, template: ChatTemplate | None = None):
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.template = template
        decoder = json.loads(raw.to_str())["decoder"] or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
        self._bytes = _BYTE_OF if "ByteLevel" in kinds else None
        self._added = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}

    @staticmethod
    def from_dir(path: str | Path) -> Tokenizer | None:
        """The tokenizer in a model's directory, or None where it has no tokenizer.json. Raises `ConfigError` for
        files that can't be read."""
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            raw = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} is not a tokenizer that minisgl can read: {error}") from error
        config = _read_json(path / "tokenizer_config.json")
        names = {**_read_json(path / "special_tokens_map.json"), **config}
        special = {name: _content(names[name]) for name in _SPECIAL_TOKENS if names.get(name) is not None}
        source = _template_source(path, config)
        try:
            return Tokenizer(raw, ChatTemplate(source, special) if source is not None else None)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Token ids that it knows; a model's vocabulary is often padded to more."""
        return self.raw.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text has at least its length divided by this in tokens."""
        return max(map(len, self.raw.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` lets the post-processor add its own (BOS)."""
        return self.raw.encode(text, add_special_tokens=special).ids

    def render(
        self, turns: Sequence[Mapping[str, Any]], generate: bool = True, extra: Mapping[str, Any] | None = None
    ) -> str:
        """A conversation as the model's chat template writes it. Raises `InvalidRequestError` where there is no
        template or it
        does not take these turns."""
        if self.template is None:
            raise InvalidRequestError(
                "messages", "This model has no chat template: use /v1/completions with a plain prompt."
            )
        return self.template.render(turns, generate, extra)

    def chat(
        self, turns: Sequence[Mapping[str, Any]], generate: bool = True, extra: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself, so the post-processor is left out."""
        return self.encode(self.render(turns, generate, extra), special=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that it does not know have none."""
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, which need not be whole characters."""
        if token in self._added:
            return self._added[token].encode()
        piece = self.raw.id_to_token(token)
        if piece is None:
            return b""
        if self._bytes is not None:
            return bytes(self._bytes.get(character, 0x3F) for character in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is not whole."""
        return self.token_bytes(token).decode(errors="replace")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return content


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: a file of its own, or a string or a list of named ones in tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet of byte-level tokens: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
