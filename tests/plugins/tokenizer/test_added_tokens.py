"""Tokens that only the files beside tokenizer.json add have the ids that they have in transformers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from minisgl.config import ConfigError
from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

from ...tokenizer.conftest import byte_level, sentencepiece_like

TEXTS = [
    "<|tool|>hi", "a <|tool|>  b", "a<|tool|>b", "<|pad|>x", " <x> y", "wordy word", "<|end|>", "<|eos|>", "Hello",
    "hello HELLO Hello", "<|bos|>a", "▁tok", "<image> </s>",
]  # fmt: skip
CONTENTS = ("<|tool|>", "<|pad|>", "<x>", "word", "<|end|>", "Hello", "<image>", "hello", "tok")
RAW = {True: byte_level().to_str(), False: sentencepiece_like().to_str()}
BYTE_LEVEL, SPACES = True, False


def write(folder: Path, raw: str, **files: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(raw)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def check(folder: Path) -> ExactTokenizer:
    """Compare ids, text and special tokens with those of transformers. Return minisgl's tokenizer."""
    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ExactTokenizer.from_dir(folder)
    assert ours is not None
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    expected = theirs.eos_token_id if theirs.eos_token is not None else None
    assert ours.eos_ids == (frozenset() if expected is None else {expected})
    return ours


def entry(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": {"330": entry("<|tool|>", special=True)}}},
    "an id that is not the next one": {"tokenizer_config": {"added_tokens_decoder": {"900": entry("<|tool|>")}}},
    "several, in the order of their ids": {
        "tokenizer_config": {"added_tokens_decoder": {"332": entry("<x>"), "331": entry("<|tool|>", special=True)}}
    },
    "spaces around it": {
        "tokenizer_config": {"added_tokens_decoder": {"330": entry("<|tool|>", lstrip=True, rstrip=True)}}
    },
    "a single word": {"tokenizer_config": {"added_tokens_decoder": {"330": entry("word", single_word=True)}}},
    "a token of the vocabulary": {"tokenizer_config": {"added_tokens_decoder": {"331": entry("Hello", special=True)}}},
    "other flags than in tokenizer.json": {
        "tokenizer_config": {"added_tokens_decoder": {"2": entry("<|end|>", lstrip=True, special=False)}}
    },
    "a named token": {"tokenizer_config": {"pad_token": "<|pad|>"}},
    "a named token as an object": {
        "tokenizer_config": {"pad_token": {"__type": "AddedToken", **entry("<|pad|>", lstrip=True)}}
    },
    "a named token that added_tokens_decoder describes": {
        "tokenizer_config": {"pad_token": "<|pad|>", "added_tokens_decoder": {"330": entry("<|pad|>", rstrip=True)}}
    },
    "a name of its own": {"tokenizer_config": {"image_token": "<image>", "pad_token": "<|pad|>"}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": ["<x>", "<|tool|>"]}},
    "named extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<image>"}}},
    "additional_special_tokens": {"tokenizer_config": {"additional_special_tokens": ["<x>", "<|tool|>"]}},
    "both kinds of lists": {
        "tokenizer_config": {"additional_special_tokens": ["<x>"], "extra_special_tokens": ["<|tool|>"]}
    },
    "added_tokens.json": {"added_tokens": {"<|tool|>": 331, "<x>": 330}},
    "added_tokens.json with a special token": {
        "added_tokens": {"<|tool|>": 330, "<x>": 331}, "tokenizer_config": {"additional_special_tokens": ["<x>"]},
    },
    "special_tokens_map.json": {
        "special_tokens_map": {"pad_token": "<|pad|>", "additional_special_tokens": ["<x>"]},
        "tokenizer_config": {"pad_token": "<|tool|>", "eos_token": "<|eos|>"},
    },
    "special_tokens_map.json with objects": {
        "special_tokens_map": {"eos_token": {"content": "<|end|>", "lstrip": True, "rstrip": True}},
        "tokenizer_config": {"eos_token": "<|eos|>"},
    },
    "special_tokens_map.json beside added_tokens_decoder": {
        "special_tokens_map": {"eos_token": "<x>"},
        "tokenizer_config": {"eos_token": "<|eos|>", "added_tokens_decoder": {"330": entry("<|tool|>")}},
    },
    "null": {"tokenizer_config": {"eos_token": None, "pad_token": None, "extra_special_tokens": None}},
    "BOS and EOS options, which tokenizer.json decides": {
        "tokenizer_config": {
            "bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": False, "add_eos_token": True,
        }
    },
    "special tokens are split": {"tokenizer_config": {"split_special_tokens": True, "eos_token": "<|eos|>"}},
    "no tokenizer_config.json": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", [BYTE_LEVEL, SPACES], ids=["byte-level", "spaces"])
@pytest.mark.parametrize("name", CASES)
def test_files(name: str, kind: bool, tmp_path: Path) -> None:
    check(write(tmp_path, RAW[kind], **CASES[name]))


def test_padding_of_tokenizer_json(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer.from_str(RAW[BYTE_LEVEL])
    raw.enable_padding(pad_id=0, pad_token="<|pad|>", length=20)
    raw.enable_truncation(2)
    assert len(check(write(tmp_path, raw.to_str())).encode("Hello world, Hello")) > 2


flags = st.fixed_dictionaries({name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "special")})
entries = st.builds(lambda content, given: entry(content, **given), st.sampled_from(CONTENTS), flags)
objects = entries.map(lambda given: {"__type": "AddedToken", **given})
values = st.one_of(st.none(), st.sampled_from(CONTENTS), objects)
lists = st.lists(st.one_of(st.sampled_from(CONTENTS), objects), max_size=3)
NAMES = ("eos_token", "pad_token", "unk_token", "mask_token")
configs = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, values),
        "image_token": st.sampled_from(CONTENTS),
        "video_token": objects,
        "added_tokens_decoder": st.dictionaries(st.integers(0, 400).map(str), entries, max_size=3),
        "extra_special_tokens": st.one_of(lists, st.fixed_dictionaries({"audio_token": st.sampled_from(CONTENTS)})),
        "additional_special_tokens": lists,
        "tokenizer_class": st.sampled_from(["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2TokenizerFast"]),
        "legacy": st.booleans(),
        "add_prefix_space": st.booleans(),
        "add_bos_token": st.booleans(),
    },
)
plain = entries.map(lambda given: {key: value for key, value in given.items() if key != "special"})
maps = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.one_of(st.sampled_from(CONTENTS), plain) for name in NAMES},
        "image_token": st.one_of(st.sampled_from(CONTENTS), plain),
        "additional_special_tokens": st.lists(st.sampled_from(CONTENTS), max_size=2),
    },
)

more = st.dictionaries(st.integers(320, 400), st.sampled_from(CONTENTS), max_size=2).map(
    lambda texts: {text: i for i, text in texts.items()}
)


@settings(deadline=None, max_examples=60)
@given(configs, maps, more, st.booleans())
def test_random_files(config: dict[str, Any], named: dict[str, Any], added: dict[str, int], kind: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), RAW[kind], tokenizer_config=config, special_tokens_map=named, added_tokens=added)
        check(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"330": "<x>"}},
        {"added_tokens_decoder": {"a": entry("<x>")}},
        {"added_tokens_decoder": [1]},
        {"eos_token": 5},
        {"extra_special_tokens": 7},
        {"extra_special_tokens": [7]},
        {"tokenizer_class": "T5TokenizerFast"},
        {"tokenizer_class": "BertTokenizer"},  # tokenizer.json has a BPE model
    ],
)
def test_a_wrong_tokenizer_config(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ExactTokenizer.from_dir(write(tmp_path, RAW[BYTE_LEVEL], tokenizer_config=config))


def test_the_token_of_a_class(tmp_path: Path) -> None:
    """A class of transformers names special tokens where tokenizer_config.json names none."""
    ours = check(write(tmp_path, RAW[SPACES], tokenizer_config={"tokenizer_class": "LlamaTokenizer"}))
    assert AddedToken("</s>", special=True) in ours.raw.get_added_tokens_decoder().values()
