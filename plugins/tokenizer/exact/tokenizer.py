"""`ExactTokenizer`: the parts of this folder as one tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from minisgl.config import ConfigError
from minisgl.core import SamplingParams
from minisgl.plugins.tokenizer.exact.clean_up import CleanStream, clean_up
from minisgl.plugins.tokenizer.exact.client_text import ClientText
from minisgl.plugins.tokenizer.exact.load import load_tokenizer
from minisgl.plugins.tokenizer.exact.template import CheckedTemplate, RenderedChat
from minisgl.tokenizer import chat
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer, decoder_parts, template_source


class ExactTokenizer(Tokenizer):
    """A tokenizer with the tokens, the text and the prompts of transformers.

    ``clean_up_spaces`` says whether `decode` removes spaces before punctuation. Raise ValueError for a decoder that is
    not supported.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        template: CheckedTemplate | None = None,
        parse_special_tokens: bool = False,
        *,
        eos_ids: frozenset[int] = frozenset(),
        clean_up_spaces: bool = False,
    ):
        super().__init__(raw, template, parse_special_tokens, eos_ids=eos_ids)
        self.clean_up_spaces = clean_up_spaces
        self._is_local = _is_local(decoder_parts(raw))

    @classmethod
    def from_dir(cls, path: str | Path, parse_special_tokens: bool = False) -> Self | None:
        """Return the tokenizer in a model's directory, or None if the directory has none: see `load_tokenizer`.

        Raise `ConfigError` if a tokenizer file can't be read.
        """
        path = Path(path)
        loaded = load_tokenizer(path)
        if loaded is None:
            return None
        source = template_source(path, loaded.config)
        try:
            template = None if source is None else CheckedTemplate(source, loaded.special)
            return cls(
                loaded.raw,
                template,
                parse_special_tokens,
                eos_ids=loaded.eos_ids,
                clean_up_spaces=loaded.clean_up_spaces,
            )
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    def _skipped_tokens(self) -> frozenset[int]:
        """Return the added tokens that the library leaves out of a text without special tokens.

        It does not go by the flag of a token alone: a token that was added twice may be left out without it.
        """
        raw, decoder = self.raw, self.raw.decoder
        raw.decoder = None  # a decoder may give another token an empty text, too
        try:
            added = raw.get_added_tokens_decoder()
            return frozenset(token for token in added if raw.decode([token]) != raw.decode([token], False))
        finally:
            raw.decoder = decoder

    # ---- chats -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _client_text(self) -> ClientText | None:
        """None if special tokens in messages are tokens. It is made for the first chat: rank 0 has none."""
        if self._parse_special_tokens or not isinstance(self.template, CheckedTemplate):
            return None
        return ClientText(self.raw, self.template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> chat.RenderedChat:
        """Return chat messages as one text: see `CheckedTemplate.render_checked` and `ClientText`."""
        kwargs = chat_template_kwargs or {}
        if self._client_text is not None:
            return self._client_text.render(messages, add_generation_prompt, kwargs)
        if isinstance(self.template, CheckedTemplate):
            return self.template.render_checked(messages, add_generation_prompt, kwargs)
        return super().render(messages, add_generation_prompt, kwargs)

    def encode_chat(self, chat: chat.RenderedChat) -> list[int]:
        """Return the token ids of rendered messages, in whose text special tokens are text: see `ClientText`."""
        if self._client_text is None or not isinstance(chat, RenderedChat):
            return super().encode_chat(chat)
        return self._client_text.encode(chat)

    # ---- text --------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the tokenizer's vocabulary add no text."""
        text = self.decode_raw(ids, skip_special_tokens)
        return clean_up(text) if self.clean_up_spaces else text

    def stream(self, prompt_tail: Sequence[int], params: SamplingParams) -> TextStream:
        """Return a stream for any decoder: see `Tokenizer.stream`."""
        stream: TextStream
        if self._is_local:
            stream = super().stream(prompt_tail, params)
        else:
            stream = WholeStream(self, params.skip_special_tokens)
        return CleanStream(stream) if self.clean_up_spaces else stream


def _is_local(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a later token leaves the text of the tokens before it as it is.

    ``parts`` are those of the decoder. Otherwise, the text is changed after the tokens' texts were joined. Raise
    ValueError for a decoder that is not supported.
    """
    if any(part["type"] == "Strip" and part["stop"] for part in parts):
        raise ValueError("The decoder strips the end of a text, in which the library fails for short texts.")
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return True
    joined = kinds.index("Fuse") + 1 if "Fuse" in kinds else len(kinds)
    return "ByteLevel" not in kinds and all(kind in ("Fuse", "Strip") for kind in kinds[joined:])


class WholeStream:
    """A stream for a decoder in which a later token may change all text before it: the text comes at the end."""

    pending = ""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        return ""

    def flush(self) -> str:
        tokens, self._tokens = self._tokens, []
        return self._tokenizer.decode_raw(tokens, self._skip)
