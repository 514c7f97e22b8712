"""A model's tokenizer: converts text to token ids and back, using the tokenizer files of a Hugging Face checkpoint.

``tokenizer.json`` is read with the ``tokenizers`` library; ``tokenizer_config.json`` names the special tokens, and it
or ``chat_template.jinja`` has the chat template. The module knows nothing about requests. A plugin of the group
``tokenizer`` may build a `Tokenizer` from other files, or a subclass that renders messages or decodes in another way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from minisgl.config import ConfigError
from minisgl.message import ChatPrompt
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.plugin_manager.manager import PluginManager
from minisgl.sampling_params import InvalidRequestError, SamplingParams
from minisgl.tokenizer.chat import ChatTemplate, RenderedChat, normalize, strings_of
from minisgl.tokenizer.text_stream import ByteLevelStream, TextStream, WholeStream
from minisgl.utils.json_file import read_json_if_present

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens with a name. A chat template may read their texts."""
GRAMMARS = "minisgl.plugins.grammar.lazy"
"""The plugin that reads the grammars of requests."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A model's tokenizer and its chat template. ``raw`` is the underlying ``tokenizers.Tokenizer``.

    ``template`` is None for a model without a chat template. With ``parse_special_tokens``, special tokens in the text
    of chat messages are tokens; otherwise they are text. ``special_ids`` are the tokens' ids by their text. ``eos_ids``
    has the id of the end-of-sequence token, if there is one.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        template: ChatTemplate | None = None,
        parse_special_tokens: bool = False,
        *,
        eos_ids: frozenset[int] = frozenset(),
    ):
        raw.no_truncation()
        raw.no_padding()
        self.raw, self.template, self.eos_ids = raw, template, eos_ids
        self._parse_special_tokens = parse_special_tokens
        self.decoder_kinds = [part["type"] for part in decoder_parts(raw)]
        self.stream_class: Callable[[Tokenizer, Sequence[int], bool], TextStream]
        self.stream_class = ByteLevelStream if self.decoder_kinds == ["ByteLevel"] else WholeStream
        self._is_byte_level = "ByteLevel" in self.decoder_kinds
        added = raw.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.skipped = self._skipped_tokens()
        self.special_ids = {added[i].content: i for i in self.skipped}
        special = sorted(filter(None, self.special_ids), key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._decoded: dict[int, bytes] = {}  # a cache of `decoded_bytes` of every token that is not special

    @classmethod
    def from_dir(cls, path: str | Path, parse_special_tokens: bool = False) -> Tokenizer | None:
        """Return the tokenizer in a model's directory as a server with default options has it, or None.

        None: the directory has no tokenizer. A subclass reads the directory itself, with its method `read`. Raise
        `ConfigError` if a file can't be read.
        """
        if cls is Tokenizer:
            manager = PluginManager.load(light=True)
            options = manager.find("tokenizer", "auto")
            if options is not None:
                return build_tokenizer(options(), manager, Path(path), parse_special_tokens)
        return cls.read(path, parse_special_tokens)

    @classmethod
    def read(cls, path: str | Path, parse_special_tokens: bool = False) -> Self | None:
        """Return the tokenizer in a model's directory, or None if the directory has no ``tokenizer.json``.

        ``parse_special_tokens`` is that of `Tokenizer`. Raise `ConfigError` if a file can't be read.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        config = read_json_if_present(path / "tokenizer_config.json")
        if not file.is_file():
            return None
        raw = read_tokenizer(file)
        try:
            known = raw.get_added_tokens_decoder()
            added = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
            raw.add_tokens([AddedToken(**token) for i, token in sorted(added.items()) if i not in known])
            special = {name: str(config[name]) for name in SPECIAL_TOKENS if isinstance(config.get(name), str)}
            special |= {name: config[name]["content"] for name in SPECIAL_TOKENS if isinstance(config.get(name), dict)}
            eos = raw.token_to_id(special["eos_token"]) if "eos_token" in special else None
            source = template_source(path, config)
            template = None if source is None else ChatTemplate(source, special)
            eos_ids = frozenset[int]() if eos is None else frozenset([eos])
            return cls(raw, template, parse_special_tokens, eos_ids=eos_ids)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}: its tokenizer can't be used: {error}") from error

    def _skipped_tokens(self) -> frozenset[int]:
        """Return the tokens that `decode` leaves out if special tokens are skipped."""
        return frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the tokenizer's vocabulary. A model's vocabulary is often padded to a larger size."""
        return self.raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. ``add_special_tokens`` lets the post-processor add special tokens (BOS)."""
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def check_length(self, prompt: str | ChatPrompt, max_tokens: int) -> None:
        """Raise `InvalidRequestError` for a text or a chat that need not be tokenized, as it has too many characters.

        It has more than ``max_tokens`` tokens then. This tokenizer refuses none: the scheduler counts the tokens.
        """

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> RenderedChat:
        """Return chat messages as one text, rendered with the model's chat template: see `ChatTemplate.render`.

        Raise `InvalidRequestError` if the model has no chat template, if the template can't render these messages, or
        if they have the text of a special token, which is allowed with ``parse_special_tokens``.
        """
        if self.template is None:
            raise InvalidRequestError(
                "messages", "This model has no chat template: use /v1/completions with a plain prompt."
            )
        given = [normalize(messages), chat_template_kwargs, list(tools)]
        if not self._parse_special_tokens and any(map(self._special_text.search, strings_of(given))):
            raise InvalidRequestError(
                "messages",
                "The messages contain the text of a special token. Remove it, or start the server with tokenizer=auto, "
                "for which it is text, or with parse_special_tokens=true.",
            )
        return RenderedChat(self.template.render(messages, add_generation_prompt, chat_template_kwargs, tools))

    def render_prompt(self, prompt: ChatPrompt) -> RenderedChat:
        """Return a chat as one text: `render`, which gets ``tools`` only if there are some.

        Raise `InvalidRequestError` for ``continue_final_message``, which needs a plugin's tokenizer.
        """
        if prompt.continue_final_message:
            what = "continue_final_message is not supported by this tokenizer: use tokenizer=auto."
            raise InvalidRequestError("continue_final_message", what)
        return self._render_prompt(prompt, prompt.messages)

    def _render_prompt(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> RenderedChat:
        more = {"tools": prompt.tools} if prompt.tools else {}
        return self.render(messages, prompt.add_generation_prompt, prompt.chat_template_kwargs, **more)

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Return the token ids of rendered messages.

        The chat template itself writes the BOS token, so the post-processor must not add another BOS.
        """
        return self.encode(chat.text, add_special_tokens=False)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of chat messages: `render_prompt` and `encode_chat`."""
        given: Any = messages  # ChatPrompt needs lists and dicts only where it is encoded
        kwargs: Any = chat_template_kwargs or {}
        return self.encode_chat(
            self.render_prompt(ChatPrompt(given, add_generation_prompt, kwargs, list(map(dict, tools))))
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the tokenizer's vocabulary add no text."""
        return self.decode_raw(ids, skip_special_tokens)

    def decode_raw(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text that the decoder of ``tokenizer.json`` makes. A subclass may change it in `decode`."""
        ids = [token for token in ids if not self.is_dropped(token, skip_special_tokens)]
        return self.raw.decode(ids, skip_special_tokens) if ids else ""  # some decoders fail without a token

    def stream(self, prompt_tail: Sequence[int], params: SamplingParams) -> TextStream:
        """Return a decoder of the output tokens of one request, whose pieces are together the text of `decode`.

        ``prompt_tail`` are the last tokens of the prompt, and ``params`` the request's parameters. A subclass may
        filter the text: it returns another `TextStream`, which passes on what the first one returns.
        """
        return self.stream_class(self, prompt_tail, params.skip_special_tokens)

    def is_dropped(self, token: int, skip_special_tokens: bool = True) -> bool:
        """Return whether `decode` leaves a token out: it has no text and does not separate its neighbours."""
        return (skip_special_tokens and token in self.skipped) or self.raw.id_to_token(token) is None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token represents. They may end, or begin, in the middle of a character.

        The result is empty for an id outside the tokenizer's vocabulary.
        """
        if token in self._added:
            return self._added[token].encode()
        piece = self.raw.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()

    def decoded_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes that one token adds to the text of `decode`, up to the spaces that the decoder strips.

        They differ from `token_bytes` for added tokens: a special token adds none if special tokens are skipped, and a
        byte-level decoder maps the characters of every token to bytes.
        """
        if skip_special_tokens and token in self.skipped:
            return b""
        data = self._decoded.get(token)
        if data is None:
            piece = self._added.get(token) if self._is_byte_level else None
            data = self.token_bytes(token) if piece is None else _byte_level_bytes(piece)
            self._decoded[token] = data
        return data


def read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """Read a ``tokenizer.json``. Raise `ConfigError` if it can't be read."""
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} is not a tokenizer that minisgl can read: {error}") from error


def template_source(path: Path, config: Mapping[str, Any]) -> str | None:
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


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet of byte-level tokens, as a map from a character to the byte that it represents.

    A printable byte is represented by the character with the same code. The other bytes are represented by the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = byte_of_character()


def decoder_parts(raw: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the parts of a tokenizer's decoder, each as the object that ``tokenizer.json`` has for it."""
    decoder = {} if raw.decoder is None else json.loads(raw.decoder.__getstate__())
    left, parts = [decoder] if decoder else [], []
    while left:
        part = left.pop(0)
        if part["type"] == "Sequence":
            left = [*part["decoders"], *left]
        else:
            parts.append(part)
    return parts


def _byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level token: those of its characters, or UTF-8 if a character represents no byte."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def build_tokenizer(options: Any, manager: PluginManager, path: Path, parse_special_tokens: bool) -> Tokenizer | None:
    """Return the tokenizer of the model in a directory, or None if it has none.

    ``options`` are those of the selected part of the group ``tokenizer``, which builds it. They are None if there is no
    plugin of this group: then `Tokenizer.read` reads it. Raise `ConfigError`.
    """
    if options is None:
        return Tokenizer.read(path, parse_special_tokens)
    made: Tokenizer | None = manager.build("tokenizer", options, path=path, parse_special_tokens=parse_special_tokens)
    return made


def build_grammars(options: Callable[[], Any], manager: PluginManager, tokenizer: Tokenizer | None) -> Any:
    """Return the `LazyGrammars` of ``plugins/grammar``, or None without it. ``options()`` are the group's options."""
    return import_module(GRAMMARS, GRAMMARS).LazyGrammars(options, manager, tokenizer) if exists(GRAMMARS) else None
