"""A model's tokenizer: converts text to token ids and back, using the tokenizer files of a Hugging Face checkpoint.

`minisgl.plugins.tokenizer.exact.load` reads the tokenizer with the ``tokenizers`` library. This module adds the model's chat
template. It knows nothing about requests.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers

from minisgl.config import ConfigError
from minisgl.core import InvalidRequestError, shorten
from minisgl.plugins.tokenizer.exact.clean_up import clean_up
from minisgl.plugins.tokenizer.exact.client_text import ClientText
from minisgl.plugins.tokenizer.exact.load import load_tokenizer
from minisgl.plugins.tokenizer.exact.template import ChatTemplate, RenderedChat

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A model's tokenizer and its chat template. ``raw`` is the underlying ``tokenizers.Tokenizer``.

    ``template`` is None for a model without a chat template. With ``parse_special_tokens``, special tokens in the text
    of chat messages are tokens; otherwise they are text (`ClientText`). ``eos_ids`` has the id of the end-of-sequence
    token, if there is one. ``clean_up_spaces`` says whether `decode` removes spaces before punctuation.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        template: ChatTemplate | None = None,
        parse_special_tokens: bool = False,
        *,
        eos_ids: frozenset[int] = frozenset(),
        clean_up_spaces: bool = False,
    ):
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.template = template
        self.eos_ids, self.clean_up_spaces = eos_ids, clean_up_spaces
        self._client_text = None if template is None or parse_special_tokens else ClientText(raw, template)
        self.decoding, kinds = _decoding(raw)
        self._bytes = _BYTE_OF if "ByteLevel" in kinds else None
        byte_fallback = "ByteFallback" in kinds  # whether the tokens <0x00> to <0xFF> are single bytes
        names = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
        ids = [raw.token_to_id(name) for name in names]
        self.fallback_bytes = {i: byte for byte, i in enumerate(ids) if i is not None}
        added = raw.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = _skipped(raw, list(added))
        self._special_ids = {added[i].content: i for i in self._special}
        self._decoded: dict[int, bytes] = {}  # a cache of `decoded_bytes` of every token that is not special

    @staticmethod
    def from_dir(path: str | Path, parse_special_tokens: bool = False) -> Tokenizer | None:
        """Return the tokenizer in a model's directory, or None if the directory has none: see `load_tokenizer`.

        ``parse_special_tokens`` is that of `Tokenizer`. Raise `ConfigError` if a tokenizer file can't be read.
        """
        path = Path(path)
        loaded = load_tokenizer(path)
        if loaded is None:
            return None
        source = _template_source(path, loaded.config)
        try:
            template = ChatTemplate(source, loaded.special) if source is not None else None
            return Tokenizer(
                loaded.raw,
                template,
                parse_special_tokens,
                eos_ids=loaded.eos_ids,
                clean_up_spaces=loaded.clean_up_spaces,
            )
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the tokenizer's vocabulary. A model's vocabulary is often padded to a larger size."""
        return self.raw.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """The number of characters of the longest token: n characters are at least n / max_token_chars tokens."""
        return max(map(len, self.raw.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. ``add_special_tokens`` lets the post-processor add special tokens (BOS)."""
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def min_num_tokens(self, begin: str) -> int:
        """Return a number of tokens that every text has that begins with ``begin``.

        It is the number of tokens before the last word of ``begin``, less some for a special token that ``begin`` may
        cut in two. It is at most 0 for a tokenizer that has no words.
        """
        words = self.raw.encode(begin, add_special_tokens=False).word_ids
        last = words[-1] if words else None
        return sum(word != last for word in words) - max(map(len, self._added.values()), default=0)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Return chat messages as one text, rendered with the model's chat template: see `ChatTemplate.render`.

        Raise `InvalidRequestError` if the model has no chat template, or if the template can't render these messages.
        """
        if self.template is None:
            raise InvalidRequestError(
                "messages", "This model has no chat template: use /v1/completions with a plain prompt."
            )
        kwargs = chat_template_kwargs or {}
        if self._client_text is None:
            return RenderedChat(self.template.render(messages, add_generation_prompt, kwargs))
        return self._client_text.render(messages, add_generation_prompt, kwargs)

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Return the token ids of rendered messages, in whose text special tokens are text: see `ClientText`.

        The chat template itself writes the BOS token, so the post-processor must not add another BOS.
        """
        if self._client_text is None:
            return self.encode(chat.text, add_special_tokens=False)
        return self._client_text.encode(chat)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of chat messages: `render` and `encode_chat`."""
        return self.encode_chat(self.render(messages, add_generation_prompt, chat_template_kwargs))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the tokenizer's vocabulary add no text."""
        text = self.decode_raw(ids, skip_special_tokens)
        return clean_up(text) if self.clean_up_spaces else text

    def decode_raw(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text that the decoder makes of token ids, before spaces are cleaned up."""
        ids = [token for token in ids if not self.is_dropped(token, skip_special_tokens)]
        return self.raw.decode(ids, skip_special_tokens) if ids else ""  # some decoders fail without a token

    def is_dropped(self, token: int, skip_special_tokens: bool = True) -> bool:
        """Return whether `decode` leaves a token out: it has no text and does not separate its neighbours."""
        return (skip_special_tokens and token in self._special) or self.raw.id_to_token(token) is None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token represents. They may end, or begin, in the middle of a character.

        The result is empty for an id outside the tokenizer's vocabulary.
        """
        if token in self._added:
            return self._added[token].encode()
        piece = self.raw.id_to_token(token)
        if piece is None:
            return b""
        if self._bytes is not None:
            return _byte_level_bytes(piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()

    def decoded_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes that one token adds to the text of `decode`, up to the spaces that the decoder strips.

        They differ from `token_bytes` for added tokens: a special token adds none if special tokens are skipped, and a
        byte-level decoder maps the characters of every token to bytes.
        """
        if skip_special_tokens and token in self._special:
            return b""
        data = self._decoded.get(token)
        if data is None:
            piece = self._added.get(token) if self._bytes is not None else None
            data = self.token_bytes(token) if piece is None else _byte_level_bytes(piece)
            self._decoded[token] = data
        return data

    def stop_tokens(self, stops: Sequence[str], skip_special_tokens: bool = True) -> dict[int, str]:
        """Return the stop strings that are one special token: id of the token → stop string.

        Special tokens are left out of the text if ``skip_special_tokens`` is true, so such a stop string is found by
        its token. Raise `InvalidRequestError` for a stop string that could then never be found, because it has a
        special token beside other text.
        """
        found = {self._special_ids[stop]: stop for stop in stops if stop in self._special_ids}
        for stop in stops if skip_special_tokens else ():
            inside = next((text for text in self._special_ids if text in stop), None)
            if inside is not None and stop not in self._special_ids:
                raise InvalidRequestError(
                    "stop",
                    f"The stop string {shorten(repr(stop))} has the special token {shorten(repr(inside))} beside other "
                    "text. Special tokens are left out of the text, so it would never be found: give the special token "
                    "alone, or set skip_special_tokens to false.",
                )
        return found

    def token_text(self, token: int) -> str:
        """Return `token_bytes` as text, with U+FFFD in place of incomplete characters."""
        return self.token_bytes(token).decode(errors="replace")


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the source of the model's default chat template, or None if the model has no chat template.

    The template is the file ``chat_template.jinja``, or the entry ``chat_template`` of ``tokenizer_config.json``. That
    entry is a string, or a list of named templates, of which the template named ``default`` is returned.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet of byte-level tokens, as a map from a character to the byte that it represents.

    A printable byte is represented by the character with the same code. The other bytes are represented by the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
Decoding = Literal["bytes", "tokens", "whole"]


def _skipped(raw: tokenizers.Tokenizer, ids: Sequence[int]) -> frozenset[int]:
    """Return the added tokens that the library leaves out of a text without special tokens.

    It does not go by the flag of a token alone: a token that was added twice may be left out without it.
    """
    decoder = raw.decoder
    raw.decoder = None  # a decoder may give another token an empty text, too
    try:
        return frozenset(token for token in ids if raw.decode([token]) != raw.decode([token], False))
    finally:
        raw.decoder = decoder


def _decoding(raw: tokenizers.Tokenizer) -> tuple[Decoding, list[str]]:
    """Return how a tokenizer decodes, and the kinds of the parts of its decoder.

    "bytes": the text is the UTF-8 decoding of the tokens' bytes. "tokens": each token has a text that may depend on the
    tokens before it. "whole": the text is changed after the tokens' texts were joined. Raise ValueError for a decoder
    that is not supported.
    """
    decoder = {} if raw.decoder is None else json.loads(raw.decoder.__getstate__())
    parts, kinds = [decoder] if decoder else [], []
    while parts:
        part = parts.pop(0)
        if part["type"] == "Sequence":
            parts = [*part["decoders"], *parts]
        elif part["type"] == "Strip" and part["stop"]:
            raise ValueError("The decoder strips the end of a text, in which the library fails for short texts.")
        else:
            kinds.append(part["type"])
    if kinds == ["ByteLevel"]:
        return "bytes", kinds
    joined = kinds.index("Fuse") + 1 if "Fuse" in kinds else len(kinds)
    local = "ByteLevel" not in kinds and all(kind in ("Fuse", "Strip") for kind in kinds[joined:])
    return ("tokens" if local else "whole"), kinds


def _byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level token: those of its characters, or UTF-8 if a character represents no byte."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()
