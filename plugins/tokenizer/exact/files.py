"""Reads the tokenizer of an older checkpoint: ``vocab.json`` and ``merges.txt`` instead of ``tokenizer.json``.

How text is split before the merges is not in these files. It follows from the class of the tokenizer in transformers
(`minisgl.plugins.tokenizer.exact.classes`). `minisgl.plugins.tokenizer.exact.load` adds the tokens of the other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, processors

from minisgl.config import ConfigError

_CLASSES = {"Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "GPT2Tokenizer": ("gpt2",)}
"""Class whose ``vocab.json`` and ``merges.txt`` are supported → ``model_type`` of the models that have this class if no
file names one."""

_OTHERS = ("vocab.json", "merges.txt", "*.model", "tekken.json", "*.tiktoken", "vocab.txt")


def vocabulary_class(path: Path, model: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the tokenizer class of a directory without ``tokenizer.json``, or None if it has no tokenizer file.

    ``model`` is the content of ``config.json``, ``config`` that of ``tokenizer_config.json``. Raises `ConfigError` for
    a tokenizer in another format than ``vocab.json`` and ``merges.txt`` of a supported class.
    """
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    types = (name for name, types in _CLASSES.items() if model.get("model_type") in types)
    kind = next(types, "") if named is None else str(named).removesuffix("Fast")
    if kind in _CLASSES and all((path / name).is_file() for name in ("vocab.json", "merges.txt")):
        return kind
    found = sorted(file.name for pattern in _OTHERS for file in path.glob(pattern))
    if not found:
        return None
    raise ConfigError(
        f"{path} has {', '.join(found)}, but no tokenizer.json, and its tokenizer is not a byte-level one with "
        f"vocab.json and merges.txt that minisgl knows ({', '.join(_CLASSES)}; this is {kind or 'unknown'}). Write "
        f"tokenizer.json with transformers: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        ". It needs: pip install transformers sentencepiece protobuf tiktoken."
    )


def read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """Read ``vocab.json`` and ``merges.txt``, without added tokens. Raises `ConfigError` if they can't be read."""
    vocab, merges = path / "vocab.json", path / "merges.txt"
    try:
        return tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{vocab} and merges.txt are not a tokenizer that minisgl can read: {error}") from error


def check_ids(raw: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an added token has another id than its configuration says.

    The library numbers added tokens itself, after those of ``vocab.json``.
    """
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        if (found := raw.token_to_id(token["content"])) != int(number):
            raise ConfigError(
                f"the files give the added token {token['content']!r} the id {number}, but it would be {found}: ids of "
                "added tokens must follow those of vocab.json."
            )


def add_ends(raw: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Let the tokenizer add the tokens that ``add_bos_token`` and ``add_eos_token`` of its configuration ask for."""
    bos, eos = (names.get(name) if config.get(f"add_{name}") else None for name in ("bos_token", "eos_token"))
    if bos or eos:
        template = [*filter(None, [bos]), "$A", *filter(None, [eos])]
        special = [(text, raw.token_to_id(text)) for text in {bos, eos} if text]
        raw.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
