"""Which files of a model's directory hold its tokenizer, and how the ``tokenizers`` library reads them.

``tokenizer.json`` has everything. Older checkpoints have ``vocab.json`` and ``merges.txt`` instead, with the added
tokens in other files. How text is split before the merges is then not in the files. It follows from the class of the
tokenizer in transformers, of which this module knows those in `_CLASSES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.config import ConfigError
from minisgl.utils.json_file import read_json

__all__ = ["raw_tokenizer"]

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pattern of words: those of one language's letters, single digits, punctuation, line ends and spaces."""

_CLASSES = {"Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "GPT2Tokenizer": ("gpt2",)}
"""Supported ``tokenizer_class`` → ``model_type`` of the models that have it if no file names a class."""

_OTHERS = ("vocab.json", "merges.txt", "*.model", "tekken.json", "*.tiktoken", "vocab.txt")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def raw_tokenizer(path: Path) -> tokenizers.Tokenizer | None:
    """Return the tokenizer in a model's directory, or None if the directory has no file of a tokenizer.

    Raises `ConfigError` if a file can't be read, or if the directory has a tokenizer in another format.
    """
    file, vocab, merges = path / "tokenizer.json", path / "vocab.json", path / "merges.txt"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} is not a tokenizer that minisgl can read: {error}") from error
    config = _read(path / "tokenizer_config.json")
    kind = _kind(config, _read(path / "config.json"))
    if kind in _CLASSES and vocab.is_file() and merges.is_file():
        try:
            model = models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{vocab} and merges.txt are not a tokenizer that minisgl can read: {error}") from error
        return _byte_level(model, kind, path, config)
    found = sorted(file.name for pattern in _OTHERS for file in path.glob(pattern))
    if not found:
        return None
    raise ConfigError(
        f"{path} has {', '.join(found)}, but no tokenizer.json, and its tokenizer is not a byte-level one with "
        f"vocab.json and merges.txt that minisgl knows ({', '.join(_CLASSES)}; this is {kind or 'unknown'}). Write "
        f"tokenizer.json with transformers: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        ". It needs: pip install transformers sentencepiece protobuf tiktoken."
    )


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _kind(config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Return the class of the tokenizer in transformers, without the suffix ``Fast``."""
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if named is not None:
        return str(named).removesuffix("Fast")
    return next((name for name, types in _CLASSES.items() if model.get("model_type") in types), "")


def _byte_level(model: models.BPE, kind: str, path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of the class ``kind`` with the merges in ``model`` and the added tokens of all files."""
    raw = tokenizers.Tokenizer(model)
    prefix_space = bool(config.get("add_prefix_space"))
    if kind == "Qwen2Tokenizer":
        raw.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
        raw.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    else:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    raw.decoder = decoders.ByteLevel()
    named = _named(path, config, kind)
    for number, token in _added(path, config, named):
        raw.add_tokens([token])
        if number is not None and raw.token_to_id(token.content) != number:
            raise ConfigError(
                f"{path}: the files give the added token {token.content!r} the id {number}, but it would be "
                f"{raw.token_to_id(token.content)}: ids of added tokens must follow those of vocab.json."
            )
    ends = [named.get(name) if config.get(f"add_{name}") else None for name in ("bos_token", "eos_token")]
    if any(ends):
        template = f"{ends[0] or ''} $A {ends[1] or ''}".strip()
        special = [(end, raw.token_to_id(end)) for end in ends if end]
        raw.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return raw


def _named(path: Path, config: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Return the text of the special tokens with a name, such as ``eos_token``, with the defaults of the class."""
    defaults = dict.fromkeys(("unk_token", "eos_token"), "<|endoftext|>")
    defaults["pad_token" if kind == "Qwen2Tokenizer" else "bos_token"] = "<|endoftext|>"
    given = {**defaults, **config}
    if "added_tokens_decoder" not in config:
        given |= _read(path / "special_tokens_map.json")
    return {name: _content(given[name]) for name in _NAMED if given.get(name) is not None}


def _added(path: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> Iterator[tuple[int | None, AddedToken]]:
    """Yield the added tokens, with their ids if a file says them, in the order of ids."""
    special = dict.fromkeys(named.values())
    others = {**_read(path / "special_tokens_map.json"), **config}
    for token in others.get("additional_special_tokens") or others.get("extra_special_tokens") or ():
        special[_content(token)] = None
    known: dict[int, AddedToken] = {}
    for number, fields in (config.get("added_tokens_decoder") or {}).items():
        known[int(number)] = AddedToken(**{**fields, "special": fields["content"] in special or fields.get("special")})
    if "added_tokens_decoder" not in config:
        for text, number in _read(path / "added_tokens.json").items():
            is_special = text in special
            known[int(number)] = AddedToken(text, normalized=not is_special, special=is_special)
    yield from sorted(known.items(), key=lambda item: item[0])
    texts = {token.content for token in known.values()}
    yield from ((None, AddedToken(text, special=True, normalized=False)) for text in special if text not in texts)


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
