"""The vocabulary in the metadata of a GGUF file as ``tokenizer.json``, ``tokenizer_config.json`` and ids of ends.

Two kinds are read. "gpt2" is byte-level BPE, with merges; ``tokenizer.ggml.pre`` names the regular expression that cuts
text before the merges. "llama" is the BPE of SentencePiece: it has a score for each token instead of merges, and any
two neighbours merge whose text together is a token, the best score first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.config import ConfigError

__all__ = ["Vocabulary", "read_vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The types of tokens in ``tokenizer.ggml.token_type``."""

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_PRE = {
    "": "gpt2",
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
}
"""``tokenizer.ggml.pre`` → how text is cut."""

_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>")
"""Texts of control tokens that end an answer, as in llama.cpp. The metadata may name more tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, the content of tokenizer_config.json, and the ids of the tokens that begin and end a text."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    bos_id: int | None
    eos_ids: list[int]


def read_vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> Vocabulary | None:
    """Return the vocabulary, or None if the metadata has none. Raises `ConfigError` if it can't be used.

    ``vocab_size`` is the number of rows of the embedding.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    tokens = _list(metadata, "tokens", str)
    if len(tokens) > vocab_size:
        raise ConfigError(f"tokenizer.ggml.tokens has {len(tokens)} tokens, but the embedding has {vocab_size} rows.")
    types = _list(metadata, "token_type", int) if "tokenizer.ggml.token_type" in metadata else [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type has {len(types)} items for {len(tokens)} tokens.")
    vocab: dict[str, int] = {}
    for i, (text, of_type) in enumerate(zip(tokens, types, strict=True)):
        if of_type != UNUSED or not text.startswith("[PAD"):  # these only fill the embedding
            vocab.setdefault(text, i)
    try:
        if kind == "gpt2":
            tokenizer, adds_bos = _byte_level(metadata, vocab)
        elif kind == "llama":
            tokenizer, adds_bos = _sentence_piece(metadata, tokens, types, vocab), True
        else:
            raise ConfigError(f"tokenizer.ggml.model is {kind!r:.100}: only gpt2 and llama are supported.")
        special = [text for text, i in vocab.items() if types[i] in (CONTROL, USER_DEFINED, UNKNOWN) and text]
        tokenizer.add_tokens(
            [AddedToken(t, special=types[vocab[t]] != USER_DEFINED, normalized=False) for t in special]
        )
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the tokenizer in its metadata can't be used: {error}") from None
    names = {name: _token(metadata, f"{key}_token_id", tokens) for name, key in _NAMES.items()}
    bos, eos = names["bos_token"], names["eos_token"]
    _add_ends(tokenizer, tokens, bos if _flag(metadata, "add_bos_token", adds_bos) else None,
              eos if _flag(metadata, "add_eos_token", False) else None)  # fmt: skip
    ends = [eos, _token(metadata, "eot_token_id", tokens), _token(metadata, "eom_token_id", tokens)]
    ends += [vocab[text] for text in _ENDS if text in vocab and types[vocab[text]] in (CONTROL, USER_DEFINED)]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {name: tokens[i] for name, i in names.items() if i is not None}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        config["chat_template"] = template
    return Vocabulary(tokenizer, config, bos, list(dict.fromkeys(i for i in ends if i is not None)))


_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _list(metadata: Mapping[str, Any], key: str, of: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not all(isinstance(item, of) for item in value):
        raise ConfigError(f"tokenizer.ggml.{key} must be a list of {of.__name__}.")
    return value


def _token(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    """Return the token id ``key``. An id outside the vocabulary means that there is none, as in llama.cpp."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(tokens)
    return value if is_id else None


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise ConfigError(f"tokenizer.ggml.{key} must be true or false, got {value!r:.100}.")
    return value


def _add_ends(tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    if bos is not None or eos is not None:
        template = [tokens[i] if i is not None else text for i, text in ((bos, ""), (None, "$A"), (eos, ""))]
        ends = {tokens[i]: i for i in (bos, eos) if i is not None}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in template if part], special_tokens=list(ends.items())
        )


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Return byte-level BPE, and whether it begins texts with BOS unless the metadata says otherwise."""
    pre = metadata.get("tokenizer.ggml.pre", "")
    kind = _PRE.get(pre) if isinstance(pre, str) else None
    if kind is None:
        known = ", ".join(filter(None, _PRE))
        raise ConfigError(f"tokenizer.ggml.pre is {pre!r:.100}, an unknown way to cut text. Known: {known}.")
    pairs = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    if not all(len(pair) == 2 for pair in pairs):
        raise ConfigError("tokenizer.ggml.merges must have two parts each.")
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == "llama3"))
    byte_level: Any = pre_tokenizers.ByteLevel(_flag(metadata, "add_space_prefix", False), use_regex=True)
    if kind == "smollm":
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif kind in ("qwen2", "llama3"):
        words = Regex(_QWEN2_WORDS if kind == "qwen2" else _LLAMA3_WORDS)
        split = pre_tokenizers.Split(words, "isolated")
        byte_level = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind == "llama3"


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], vocab: dict[str, int]
) -> Tokenizer:
    """Return SentencePiece's BPE: every pair whose text together is a token is a merge, ranked by that token's score.

    Only normal tokens are merged. Text without a token becomes the tokens of its bytes.
    """
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.scores has {len(scores)} items for {len(tokens)} tokens.")
    if max(map(len, tokens)) > 1024:
        raise ConfigError("tokenizer.ggml.tokens has a token of more than 1024 characters.")
    merges: list[tuple[float, int, str, str]] = []
    for text, i in vocab.items():
        if types[i] == NORMAL:
            cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
            found = ((vocab[a], a, b) for a, b in cuts if a in vocab and b in vocab)
            merges += [(-scores[i], first, a, b) for first, a, b in sorted(found)]
    merges.sort(key=lambda merge: merge[0])
    unknown = _token(metadata, "unknown_token_id", tokens)
    model = models.BPE(
        vocab,
        [(a, b) for _, _, a, b in merges],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = _flag(metadata, "add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer
