"""Loads the tokenizer of a Hugging Face checkpoint with the tokens that it has in transformers.

``tokenizer.json`` has most of a tokenizer. ``tokenizer_config.json`` may add tokens to it, and so may
``added_tokens.json`` and ``special_tokens_map.json`` of older checkpoints. It also names the special tokens, and the
class that may replace parts of ``tokenizer.json`` (`.classes`). The result has the ids of `transformers.AutoTokenizer`,
version 5, which vLLM and SGLang use as well. As there, ``add_bos_token`` and ``add_eos_token`` have no effect beside a
``tokenizer.json``, whose post-processor says which tokens are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken

from minisgl.config import ConfigError
from minisgl.plugins.tokenizer.exact.classes import CLASSES, class_name, rebuild
from minisgl.plugins.tokenizer.exact.files import add_ends, check_ids, read_vocabulary, vocabulary_class
from minisgl.tokenizer.tokenizer import SPECIAL_TOKENS, read_tokenizer
from minisgl.utils.json_file import read_json_if_present

Token = str | AddedToken
LISTS = ("extra_special_tokens", "additional_special_tokens")
"""The fields with special tokens that have no name of their own."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer with all its tokens, and what its configuration says about it.

    ``special`` maps the names of `SPECIAL_TOKENS` to the texts of the tokens. ``config`` is the content of
    ``tokenizer_config.json``. ``clean_up_spaces`` says whether spaces before punctuation are removed from a decoded
    text.
    """

    raw: tokenizers.Tokenizer
    special: Mapping[str, str]
    config: Mapping[str, Any]
    clean_up_spaces: bool

    @property
    def eos_ids(self) -> frozenset[int]:
        """The id of the end-of-sequence token. Empty if there is none, or if the vocabulary does not have it."""
        token = self.special.get("eos_token")
        found = None if token is None else self.raw.token_to_id(token)
        return frozenset() if found is None else frozenset([found])


def load_tokenizer(path: Path) -> LoadedTokenizer | None:
    """Return the tokenizer in a model's directory, or None if the directory has no file of a tokenizer.

    Raise `ConfigError`, which names the file, if a file can't be used.
    """
    file, config_file = path / "tokenizer.json", path / "tokenizer_config.json"
    model, config = read_json_if_present(path / "config.json"), read_json_if_present(config_file)
    if file.is_file():
        name, raw = None, read_tokenizer(file)
    else:
        name = vocabulary_class(path, model, config)
        if name is None:
            return None
        raw = read_vocabulary(path)
    try:
        if name is None:
            byte_level = '"ByteLevel"' in file.read_text(encoding="utf-8")
            return _complete(path, raw, config, class_name(model, config, byte_level))
        loaded = _complete(path, raw, config, name)
        check_ids(loaded.raw, config)
        add_ends(loaded.raw, config, loaded.special)
        return loaded
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error) if isinstance(error, ConfigError) else f"a token in it can't be read: {error!r}"
        raise ConfigError(f"{config_file}: {reason}") from error


def _complete(path: Path, raw: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> LoadedTokenizer:
    """Add the tokens of all files to ``raw``, and build the parts of the class ``name`` ("": keep those of ``raw``)."""
    tokens = _Tokens.read(path, raw, config)
    if raw.padding is not None:
        tokens.named.setdefault("pad_token", raw.padding["pad_token"])
    named: dict[str, Token | None] = {**CLASSES[name].tokens, **tokens.named} if name else tokens.named
    # The order decides the ids of new tokens: transformers adds the seven names first.
    given = {key: token for key in SPECIAL_TOKENS if (token := named.pop(key, None)) is not None}
    given |= {key: token for key, token in named.items() if token is not None}
    texts = {key: str(token) for key, token in given.items()}
    if name:
        raw = rebuild(name, raw, config, texts)
    raw.add_tokens(_missing(raw, tokens, given))
    if name == "Qwen2Tokenizer":
        special = dict.fromkeys([*texts.values(), *map(str, tokens.extra)])
        raw.add_tokens([AddedToken(text, special=True) for text in special])
    if name:
        CLASSES[name].finish(raw, config, texts)
    raw.encode_special_tokens = bool(config.get("split_special_tokens", False))
    clean_up = bool(config.get("clean_up_tokenization_spaces", False))
    force = bool(config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
    if type(raw.model).__name__ == "BPE" and not force:
        clean_up = False
    return LoadedTokenizer(raw, {key: texts[key] for key in SPECIAL_TOKENS if key in texts}, config, clean_up)


@dataclass
class _Tokens:
    """The tokens that the files beside ``tokenizer.json`` mention.

    ``added`` maps ids to tokens, ``named`` has the tokens with a name, such as ``pad_token``, and ``extra`` are special
    tokens without a name.
    """

    added: dict[int, AddedToken] = field(default_factory=dict)
    named: dict[str, Token | None] = field(default_factory=dict)
    extra: list[Token] = field(default_factory=list)

    @staticmethod
    def read(path: Path, raw: tokenizers.Tokenizer, config: Mapping[str, Any]) -> _Tokens:
        """Read the tokens. The files of older checkpoints count only without ``added_tokens_decoder``."""
        fields, old = dict(config), dict[str, Any]()
        extra: Any = fields.get("extra_special_tokens")
        names = dict(extra) if isinstance(extra, dict) else {}
        extra = fields.get("additional_special_tokens") if names or not extra else extra
        extras: list[Any] = list(extra or ())
        if "added_tokens_decoder" in config:
            added = {int(i): _added(token) for i, token in config["added_tokens_decoder"].items()}
        else:
            old = read_json_if_present(path / "special_tokens_map.json")
            fields |= {key: _special(value) for key, value in old.items() if key not in LISTS}
            more = old.get("extra_special_tokens") or ()
            if isinstance(more, dict):
                names |= more
            else:
                extras += [token for token in map(_special, more) if token not in extras]
            special = {str(fields[key]) for key in SPECIAL_TOKENS if fields.get(key)} | set(map(str, extras))
            is_listed = not names and any(key in config for key in LISTS)
            if "additional_special_tokens" in old and not is_listed and "extra_special_tokens" not in old:
                extras = [*map(_special, old["additional_special_tokens"] or ())]
            added = {}
            for text, i in read_json_if_present(path / "added_tokens.json").items():
                added[int(i)] = AddedToken(text, normalized=text not in special, special=text in special)
            added |= raw.get_added_tokens_decoder()
        # The order of transformers: the seven names, then other names with an object, then other names with a text.
        by_text = {str(token): token for token in added.values()}
        named = {key: _token(fields[key], by_text) for key in SPECIAL_TOKENS if key in fields}
        objects = {key: value for key, value in config.items() if isinstance(value, dict)}
        objects |= {key: fields[key] for key in old if key not in LISTS}
        own = {key: value for key, value in config.items() if isinstance(value, str)}
        others = {key: value for key, value in {**objects, **own}.items() if _is_name(key)} | names
        named |= {key: _token(value) for key, value in others.items()}
        return _Tokens(added, named, [token for token in map(_token, extras) if token is not None])


def _is_name(key: str) -> bool:
    """Return whether a field names a special token that only one model has, such as ``image_token``."""
    return key.endswith("_token") and key not in SPECIAL_TOKENS


def _token(value: Any, described: Mapping[str, AddedToken] = MappingProxyType({})) -> Token | None:
    """Return a token of a file: a text, an object, or None. ``described`` has objects for some texts."""
    if isinstance(value, dict):
        value = _added({**value, "special": value.get("special", True)})
    if not isinstance(value, str | AddedToken | None):
        raise TypeError(f"{value!r:.100} is neither a text nor an object")
    return described.get(str(value), value)


def _special(value: Any) -> Any:
    return _added({**value, "special": True}) if isinstance(value, dict) else value


def _added(value: Any) -> AddedToken:
    return AddedToken(**{key: item for key, item in value.items() if key not in ("__type", "id")})


def _missing(raw: tokenizers.Tokenizer, tokens: _Tokens, named: Mapping[str, Token]) -> list[AddedToken]:
    """Return the tokens to add, in the order in which transformers adds them, which decides the ids of new ones.

    The tokens of ``added`` are all there: adding a token again changes its flags.
    """
    found: list[Token] = [tokens.added[i] for i in sorted(tokens.added)]
    known = {token.content for token in raw.get_added_tokens_decoder().values()} | set(map(str, found))
    found += [token for token in dict.fromkeys([*named.values(), *tokens.extra], None) if str(token) not in known]
    texts = set(map(str, named.values()))
    result = []
    for token in found:
        if isinstance(token, str):
            token = AddedToken(token, special=True)
        elif not token.special and token.content in texts:
            token.special = True
        result.append(token)
    return result
