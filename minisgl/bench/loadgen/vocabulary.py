"""The vocabulary from which prompts are drawn, read from a tokenizer. Only the main process imports this module."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from minisgl.bench.loadgen.prompts import Vocabulary
from minisgl.config import ConfigError
from minisgl.models.resolve import named_models
from minisgl.tokenizer.tokenizer import Tokenizer

_SPACE_WORD = re.compile(r"[Ġ▁]([A-Za-z]+)")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MAX_WORDS = 4096
"""Number of words from which text prompts are made."""


def find_tokenizer(name: str | None, model: str) -> Tokenizer | None:
    """Return the tokenizer of the directory or shipped model ``name``, by default of ``model``; None if it has none.

    Raise `ConfigError` if a tokenizer is asked for by name and there is none.
    """
    chosen = name if name is not None else model
    path = Path(chosen).expanduser()
    if not path.is_dir():
        path = named_models().get(chosen, path)
    found = Tokenizer.from_dir(path) if path.is_dir() else None
    if found is None and name is not None:
        raise ConfigError(f"tokenizer={name}: this is no directory with a tokenizer.json, and no shipped model.")
    return found


def vocabulary(tokenizer: Tokenizer | None, vocab_size: int | None, text: bool) -> Vocabulary:
    """Return the vocabulary for prompts as text or as ids. Raise `ConfigError` if it is not known."""
    if text:
        return _words(tokenizer)
    if vocab_size is not None:
        return Vocabulary(np.arange(vocab_size))
    if tokenizer is None:
        raise ConfigError(
            "the vocabulary of the server's model is not known: give tokenizer=DIRECTORY with its tokenizer.json, "
            "vocab_size=N, or prompts=text."
        )
    special = [i for i, token in tokenizer.raw.get_added_tokens_decoder().items() if token.special]
    return Vocabulary(np.setdiff1d(np.arange(tokenizer.vocab_size), special))


def _words(tokenizer: Tokenizer | None) -> Vocabulary:
    """Return words with a space before them, each of which is one token also beside other words.

    Without a tokenizer, the words are numbers in English, whose length in tokens is not known exactly.
    """
    if tokenizer is None:
        words = [f" {word}" for word in _NUMBERS]
        return Vocabulary(np.arange(len(words)), tuple(words))
    matches = ((i, _SPACE_WORD.fullmatch(name)) for name, i in tokenizer.raw.get_vocab().items())
    names = sorted((i, " " + match[1]) for i, match in matches if match is not None)
    np.random.default_rng(0).shuffle(names)
    found = [(int(i), word) for i, word in names[:MAX_WORDS] if _is_stable(tokenizer, int(i), str(word))]
    if not found:
        raise ConfigError("no token of the tokenizer is a word with a space before it: use prompts=ids.")
    return Vocabulary(np.array([i for i, _ in found]), tuple(word for _, word in found))


def _is_stable(tokenizer: Tokenizer, token: int, word: str) -> bool:
    return tokenizer.encode(word + word, add_special_tokens=False) == [token, token]
