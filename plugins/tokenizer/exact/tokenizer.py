"""`ExactTokenizer`: the parts of this folder as one tokenizer, and `ClientText`: special tokens in messages as text.

A chat template returns one text, in which nothing shows who wrote a part of it. So the template also renders a marked
copy of the messages: in the clients' strings, the first and last characters of all special tokens (``<`` and ``>``) are
replaced by *stand-ins*, one for one. Stand-ins are private characters that occur nowhere else. If every special token
of the tokenized text has the same characters in the marked text, the template wrote all of them, and the token ids are
those of the text. Otherwise only the special tokens of the marked text are tokens, and all else is encoded as text.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tokenizers

from minisgl.config import ConfigError
from minisgl.message import ChatPrompt
from minisgl.plugins.tokenizer.exact.continued import cut_at_tag, with_tag
from minisgl.plugins.tokenizer.exact.load import load_tokenizer
from minisgl.plugins.tokenizer.exact.messages import PrivateCharacters, map_strings, map_texts, normalize, texts_of
from minisgl.plugins.tokenizer.exact.streams import CleanStream, TokenStream, clean_up, is_local
from minisgl.plugins.tokenizer.exact.template import (
    CheckedTemplate,
    RenderedChat,
    Replacement,
    computed_with_special_tokens,
)
from minisgl.sampling_params import InvalidRequestError, too_long
from minisgl.tokenizer import chat
from minisgl.tokenizer.chat import Message, strings_of
from minisgl.tokenizer.text_stream import WholeStream
from minisgl.tokenizer.tokenizer import Tokenizer, decoder_parts, template_source

MAX_CHARS_PER_TOKEN = 16
"""The largest number of characters of a text for each token that the server allows for a request."""
BEGIN_CHARS_PER_TOKEN = 8
"""The number of characters of the beginning of a text, for each token that is allowed. It is tokenized first."""
_BRACKETS = {"<": ">", "[": "]", "{": "}", "(": ")"}


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
        has_byte_tokens = "ByteFallback" in self.decoder_kinds  # the tokens <0x00> to <0xFF> are single bytes
        ids = [raw.token_to_id(f"<0x{byte:02X}>") if has_byte_tokens else None for byte in range(256)]
        self.fallback_bytes = {i: byte for byte, i in enumerate(ids) if i is not None}
        if not is_local(decoder_parts(raw)):  # a later token may change all text before it
            self.stream_class = lambda tokenizer, tail, skip: WholeStream(tokenizer, (), skip)
        elif self.decoder_kinds != ["ByteLevel"]:
            self.stream_class = functools.partial(TokenStream, self.fallback_bytes)
        if clean_up_spaces:
            self.stream_class = functools.partial(CleanStream, self.stream_class)

    @classmethod
    def read(cls, path: str | Path, parse_special_tokens: bool = False) -> Self | None:
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
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> chat.RenderedChat:
        """Return chat messages as one text: see `CheckedTemplate.render_checked` and `ClientText`."""
        kwargs = chat_template_kwargs or {}
        if not isinstance(self.template, CheckedTemplate):
            return super().render(messages, add_generation_prompt, kwargs, tools)
        if self._client_text is not None:
            made = self._client_text.render(messages, add_generation_prompt, kwargs, tools)
        else:
            made = self.template.render_checked(messages, add_generation_prompt, kwargs, tools=tools)
        if tools:
            without = self.template.render
            self.template.check_tools(tools, made.text, lambda: without(messages, add_generation_prompt, kwargs))
        return made

    def render_prompt(self, prompt: ChatPrompt) -> chat.RenderedChat:
        """Return a chat as one text. With ``continue_final_message``, it ends with the last message's content."""
        if not prompt.continue_final_message:
            return self._render_prompt(prompt, prompt.messages)
        messages, text, tag = with_tag(prompt.messages)
        made = self._render_prompt(prompt, messages)
        assert isinstance(made, RenderedChat)
        return cut_at_tag(made, text, tag, len(messages) - 1)

    def _render_prompt(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> chat.RenderedChat:
        """Render messages. If that fails, give those with only tool calls an empty content, as Qwen 3 needs it."""
        try:
            return super()._render_prompt(prompt, messages)
        except InvalidRequestError:
            is_call = [bool(m.get("tool_calls")) and m.get("content") is None for m in messages]
            if not any(is_call):
                raise
        messages = [{**m, "content": ""} if call else m for m, call in zip(messages, is_call, strict=True)]
        return super()._render_prompt(prompt, messages)

    def encode_chat(self, chat: chat.RenderedChat) -> list[int]:
        """Return the token ids of rendered messages, in whose text special tokens are text: see `ClientText`."""
        if self._client_text is None or not isinstance(chat, RenderedChat):
            return super().encode_chat(chat)
        return self._client_text.encode(chat)

    # ---- text --------------------------------------------------------------------------------------------

    @functools.cached_property
    def max_token_chars(self) -> int:
        """The number of characters of the longest token."""
        return max(map(len, self.raw.get_vocab(with_added_tokens=True)), default=1)

    def check_length(self, prompt: str | ChatPrompt, max_tokens: int) -> None:
        """Raise `InvalidRequestError` also for a text whose beginning is too long: most texts that are end there."""
        check_num_chars(prompt, max_tokens, self.max_token_chars)
        begin = "" if isinstance(prompt, ChatPrompt) else prompt[: BEGIN_CHARS_PER_TOKEN * max_tokens]
        if isinstance(prompt, str) and len(begin) < len(prompt) and self.min_num_tokens(begin) > max_tokens:
            raise too_long("prompt", max_tokens, f"The first {len(begin)} characters of the prompt have more.")

    def min_num_tokens(self, begin: str) -> int:
        """Return a number of tokens that every text has that begins with ``begin``.

        It is the number of tokens before the last word of ``begin``, less some for a special token that ``begin`` may
        cut in two. It is at most 0 for a tokenizer that has no words.
        """
        words = self.raw.encode(begin, add_special_tokens=False).word_ids
        last = words[-1] if words else None
        return sum(word != last for word in words) - max(map(len, self._added.values()), default=0)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the tokenizer's vocabulary add no text."""
        text = self.decode_raw(ids, skip_special_tokens)
        return clean_up(text) if self.clean_up_spaces else text


def check_num_chars(prompt: str | ChatPrompt, max_tokens: int, max_token_chars: int) -> None:
    """Raise `InvalidRequestError` for a text, or a chat whose strings together, are too long for ``max_tokens``.

    ``max_token_chars`` is the number of characters of the longest token: n characters are at least
    n / max_token_chars tokens. Tokenizing a very long text would delay all other requests: 1 MiB takes about a second.
    `minisgl.plugins.http.bounds` has refused a chat with too many parts before.
    """
    most = min(max_token_chars, MAX_CHARS_PER_TOKEN) * max_tokens
    if isinstance(prompt, str):
        if len(prompt) > most:
            what = f"The prompt has {len(prompt)} characters, and at most {most} are tokenized; a plain prompt may be "
            raise too_long("prompt", max_tokens, f"{what}sent as token ids.")
        return
    num_chars = 0
    todo: list[Any] = [*prompt.messages, prompt.chat_template_kwargs, prompt.tools]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            num_chars += len(value)
        else:
            todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if num_chars > most:
        raise too_long("messages", max_tokens, f"The messages have {num_chars} characters, more than {most}.")


class ClientText:
    """Renders chats, and encodes them so that the tokens of ``protected`` come from the template only.

    ``protected`` maps the text of a token to its id. It has every special token, and the other added tokens of a form
    like ``<…>`` or ``[…]`` that the template writes, such as ``<tool_response>``. In the content of an
    assistant's message, those of the second kind stay tokens if the template looks for them, such as ``</think>``.
    """

    def __init__(self, raw: tokenizers.Tokenizer, template: CheckedTemplate):
        self._raw, self._template = raw, template
        added = [token for token in raw.get_added_tokens_decoder().values() if token.content.strip()]
        special = {token.content for token in added if token.special}
        written = "\0".join(template.literals)
        structure = {t.content for t in added if _in_brackets(t.content) and t.content in written} - special
        self.protected = {text: raw.token_to_id(text) for text in sorted(special | structure)}
        self._ids = frozenset(self.protected.values())
        edges = {edge for text in self.protected for edge in _edges(text)}
        if raw.normalizer is not None:
            edges |= _variants(edges)
        self._edges = "".join(sorted(edges))
        self._words: Sequence[str] = [text for text in self.protected if not _edges(text)]
        sought = {text for text in structure if any(text in s for s in template.sought)}
        self._rules = {False: self._make_rule(set(self.protected)), True: self._make_rule({*self.protected} - sought)}
        heads = {text[:n] for text in self.protected for n in range(1, len(text))}
        longest = max(map(len, heads), default=0)
        # Whether a part of the template ends with the beginning of a token, as in '<|' + message.role + '|>'.
        self._is_open = any(s[-n:] in heads for s in template.literals for n in range(1, min(len(s), longest) + 1))
        self._insides = "\0".join(self.protected)

    def _make_rule(self, tokens: set[str]) -> _Rule:
        """Return the rule for messages in which ``tokens`` are text."""
        kept = [s for s in self._template.sought if self._has_edge(s) and not any(token in s for token in tokens)]
        texts = "|".join(map(re.escape, sorted(kept, key=len, reverse=True))) or "(?!)"
        edges = f"[{re.escape(self._edges)}]" if self._edges else "(?!)"
        return _Rule(kept, re.compile(f"({texts})|{edges}"), sorted(tokens))

    def _has_edge(self, string: str) -> bool:
        return any(edge in string for edge in self._edges)

    # ---- rendering -----------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> RenderedChat:
        """Render messages: see `CheckedTemplate.render`. Raise `InvalidRequestError`."""
        chat = self._template.render_checked(messages, add_generation_prompt, kwargs, self._replace, tools)
        client = [*texts_of(normalize(messages)), *strings_of(kwargs), *strings_of({"": list(tools)})]
        if not chat.is_aligned and any(map(self._has_token, client)):
            raise computed_with_special_tokens()
        return chat

    def _has_token(self, string: str) -> bool:
        """Return whether a whole protected token is in a string, as it is or normalized."""
        as_encoded = str if self._raw.normalizer is None else self._raw.normalizer.normalize_str
        normal = as_encoded(string)
        return any(token in string or as_encoded(token) in normal for token in self.protected)

    def _replace(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], private: PrivateCharacters
    ) -> Replacement | None:
        """Return a copy of messages and variables with stand-ins, or None if they need none."""
        if not any(map(self._needs_stand_ins, [*texts_of(messages), *strings_of(kwargs)])):
            return None
        marks = _StandIns(private)
        marked_messages = []
        for message in messages:
            is_own = message.get("role") == "assistant"
            mark = functools.partial(self._mark, marks, is_own)
            marked_messages.append(map_texts(message, mark))
        marked_kwargs = {
            name: map_strings(value, lambda text: self._mark(marks, False, "", text)) for name, value in kwargs.items()
        }
        return Replacement(marked_messages, marked_kwargs, marks.remove)

    def _needs_stand_ins(self, string: str) -> bool:
        return (
            self._has_edge(string)
            or (self._is_open and self._is_inside(string))
            or any(word in string for word in self._words)
        )

    def _is_inside(self, string: str) -> bool:
        """Return whether a string is a part of a protected token, which the template might complete."""
        return bool(string.strip()) and string.strip() in self._insides

    def _mark(self, marks: _StandIns, is_own: bool, field: str, text: str) -> str:
        """Return a client's text with stand-ins. ``is_own`` tells whether the message is the assistant's."""
        return self._mark_string(text, marks, is_own and field == "content") if self._needs_stand_ins(text) else text

    def _mark_string(self, string: str, marks: _StandIns, own: bool) -> str:
        if self._is_open and self._is_inside(string):
            return "".join(c if c.isspace() else marks.of(c) for c in string)
        rule = self._rules[own]
        marked, left = string, self._words
        if any(text in string for text in rule.kept):
            marked = rule.pattern.sub(lambda found: found[1] or marks.of(found[0]), string)
            left = rule.tokens  # a token may overlap two of the texts that are kept
        else:
            for edge in self._edges:
                if edge in marked:
                    marked = marked.replace(edge, marks.of(edge))
        for token in left:
            if token in marked:
                marked = marked.replace(token, marks.of(token[0]) + token[1:])
        return marked

    # ---- encoding ------------------------------------------------------------------------------------

    def encode(self, chat: RenderedChat) -> list[int]:
        """Return the token ids of a rendered chat: those of its text, but no client's string has a protected token."""
        encoding = self._raw.encode(chat.text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        text, marked = chat.text, chat.marked
        if marked is None or self._ids.isdisjoint(ids):
            return ids
        if not chat.is_aligned:
            copy = self._raw.encode(marked, add_special_tokens=False).ids
            if [i for i in ids if i in self._ids] == [i for i in copy if i in self._ids]:
                return ids
            raise computed_with_special_tokens()
        tokens = self._tokens(encoding)
        written = [(start, end, i) for start, end, i in tokens if text[start:end] == marked[start:end]]
        if len(written) == len(tokens):
            return ids
        forged = [(text[a:b].strip(), marked[a:b].strip()) for a, b, _ in tokens if text[a:b] != marked[a:b]]
        # A forged token that begins or ends outside the client's string may hide one that the template wrote.
        if any(its[0] == its_marked[0] or its[-1] == its_marked[-1] for its, its_marked in forged):
            written = self._tokens(self._raw.encode(marked, add_special_tokens=False))
        return self._encode_parts(text, written)

    def _tokens(self, encoding: tokenizers.Encoding) -> list[tuple[int, int, int]]:
        """Return the protected tokens of an encoded text: first character, end, token id."""
        found = ((i, token) for i, token in enumerate(encoding.ids) if token in self._ids)
        return [(*(encoding.token_to_chars(i) or (0, 0)), token) for i, token in found]

    def _encode_parts(self, text: str, tokens: Sequence[tuple[int, int, int]]) -> list[int]:
        """Return the ids of a text of which only ``tokens`` are protected tokens: first character, end, token id."""
        ids: list[int] = []
        done = 0
        for start, end, token in [*tokens, (len(text), len(text), -1)]:
            if start > done:
                ids += self._encode_as_text(text[done:start], done == 0)
            ids += [token] if token >= 0 else []
            done = end
        return ids

    def _encode_as_text(self, text: str, is_first: bool) -> list[int]:
        """Return the ids of a text, none of them protected."""
        tokenizer = self._as_text[0 if is_first else 1]
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._ids.isdisjoint(ids):
            return ids
        # The model itself merges these characters to a token whose text is that of a protected token.
        made = [span for span, token in zip(encoding.offsets, ids, strict=True) if token in self._ids]
        parts, done = [], 0
        for start, end in made:
            parts += [text[done:start], *text[start:end]]
            done = end
        encodings = tokenizer.encode_batch([*filter(None, parts), text[done:]], add_special_tokens=False)
        return [token for each in encodings for token in each.ids if token not in self._ids]

    @functools.cached_property
    def _as_text(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
        """Two tokenizers for which protected tokens are text: for the beginning of a text, and for later parts.

        They are made when the first message needs them: each has a copy of the vocabulary.
        """
        source = json.loads(self._raw.to_str())
        for token in source["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self.protected
        first = _load_as_text(source)
        is_changed = _drop_first_prefix(source["pre_tokenizer"])
        return first, _load_as_text(source) if is_changed else first


class _StandIns:
    """The stand-ins of one chat: private characters."""

    def __init__(self, private: PrivateCharacters):
        self._private = private
        self._of: dict[str, str] = {}

    def of(self, character: str) -> str:
        """Return the stand-in of a character. Raise `InvalidRequestError` if no private character is left."""
        if character not in self._of:
            self._of[character] = self._private.take()
        return self._of[character]

    def remove(self, text: str) -> str:
        """Return a text with the characters in place of their stand-ins."""
        for character, stand_in in self._of.items():
            if stand_in in text:
                text = text.replace(stand_in, character)
        return text


@dataclass(frozen=True)
class _Rule:
    """What is replaced in a client's string: all edges that are in none of the texts ``kept``.

    The template looks for these texts. ``pattern`` finds them (group 1) and the edges. None of ``tokens`` is left.
    """

    kept: Sequence[str]
    pattern: re.Pattern[str]
    tokens: Sequence[str]


def _in_brackets(text: str) -> bool:
    return len(text) > 2 and _BRACKETS.get(text[0]) == text[-1]


def _edges(text: str) -> tuple[str, ...]:
    """Return the first and the last character of a token that is neither a letter, a digit nor a space."""
    found = [character for character in text if not character.isalnum() and not character.isspace()]
    return (found[0], found[-1]) if found else ()


def _variants(characters: set[str]) -> set[str]:
    """Return the characters that a normalizer may turn into one of these, such as U+FF1C into ``<``."""
    return {
        chr(code)
        for code in range(0x80, 0x30000)
        if unicodedata.decomposition(chr(code)) and characters & set(unicodedata.normalize("NFKD", chr(code)))
    }


def _load_as_text(source: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(source))
    tokenizer.encode_special_tokens = True  # special tokens are encoded as text
    return tokenizer


def _drop_first_prefix(pre_tokenizer: Any) -> bool:
    """Let a pre-tokenizer add no space before the first word of a text. Return whether it added one."""
    if not isinstance(pre_tokenizer, dict):
        return False
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    found = [part for part in parts if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first"]
    for part in found:
        part["prepend_scheme"] = "never"
    return bool(found)
