"""Tokenizers of the files ``vocab.json`` and ``merges.txt``, compared with transformers; other formats are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer
from minisgl.testing.checkpoints import tiny_checkpoint

TEXTS = [
    "A page of the pool holds sixteen tokens.",
    "don't DON'T  two  spaces\n\n\nlines \t tab 2024 3.14",
    "cafe\u0301 café ﬁ 前缀缓存 🙂👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|> <tool_call>x</tool_call><|endoftext|>",
    " leading and trailing ",
    "",
]
SPECIAL = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``vocab.json`` and ``merges.txt`` of a small byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    whole = tiny_checkpoint("qwen2", folder / "whole", tokenizer=True, vocab_size=400)
    model = json.loads((whole / "tokenizer.json").read_text())["model"]
    first = {token: i - 4 for token, i in model["vocab"].items() if i >= 4}  # without special tokens, as in Qwen2
    (folder / "vocab.json").write_text(json.dumps(first), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder


def make(files: Path, folder: Path, **contents: dict[str, Any]) -> Path:
    """Copy the files and write JSON files: the name of an argument is that of the file without ``.json``."""
    folder.mkdir(exist_ok=True)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text((files / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def size(files: Path) -> int:
    return len(json.loads((files / "vocab.json").read_text()))


def equal(path: Path) -> ExactTokenizer:
    """Check that ids and text of `TEXTS` are transformers', and return the tokenizer."""
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(path)
    ours = ExactTokenizer.from_dir(path)
    assert ours is not None
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (False, True):
            decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded
    return ours


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"])
@pytest.mark.parametrize("prefix_space", [False, True])
def test_added_tokens_of_the_configuration(kind: str, prefix_space: bool, files: Path, tmp_path: Path) -> None:
    first = size(files)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    added = {str(first + i): {**SPECIAL, "content": name, "special": i < 3} for i, name in enumerate(names)}
    config = {
        "tokenizer_class": kind,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>" if kind == "GPT2Tokenizer" else None,
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>" if kind == "GPT2Tokenizer" else None,
        "add_prefix_space": prefix_space,
    }
    assert equal(make(files, tmp_path, tokenizer_config=config)).encode("<|im_end|>")[-1] == first + 2


def test_added_tokens_file(files: Path, tmp_path: Path) -> None:
    """Checkpoints of 2023 have ``added_tokens.json`` and ``special_tokens_map.json``."""
    first = size(files)
    tokens = {"<|im_start|>": first + 1, "<|endoftext|>": first, "<|im_end|>": first + 2, "<tool_call>": first + 3}
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    config = {"tokenizer_class": "Qwen2Tokenizer"}
    path = make(files, tmp_path, tokenizer_config=config, added_tokens=tokens, special_tokens_map=special)
    assert equal(path).encode("<|im_start|>") == [first + 1]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gpt2"])
def test_the_class_follows_from_the_model(model_type: str, files: Path, tmp_path: Path) -> None:
    equal(make(files, tmp_path, config={"model_type": model_type}))


def test_bos_and_eos_are_added(files: Path, tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<|endoftext|>"}
    ours = equal(make(files, tmp_path, tokenizer_config=config))
    assert ours.encode("") == [size(files)]


def test_ids_that_do_not_follow_the_vocabulary(files: Path, tmp_path: Path) -> None:
    """``tokenizers`` numbers added tokens itself, so another number is refused."""
    added = {str(size(files) + 5): {**SPECIAL, "content": "<|im_end|>"}}
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    with pytest.raises(ConfigError, match=r"added token '<\|im_end\|>' the id \d+, but it would be"):
        ExactTokenizer.from_dir(make(files, tmp_path, tokenizer_config=config))


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "RobertaTokenizer", None])
def test_other_classes_are_refused(kind: str | None, files: Path, tmp_path: Path) -> None:
    path = make(files, tmp_path, tokenizer_config={"tokenizer_class": kind}, config={"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"merges\.txt, vocab\.json, but no tokenizer\.json.*from_pretrained"):
        ExactTokenizer.from_dir(path)


@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json", "qwen.tiktoken", "vocab.json", "vocab.txt"])
def test_other_formats_are_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError) as error:
        ExactTokenizer.from_dir(tmp_path)
    assert f"has {file}, but no tokenizer.json" in str(error.value)
    assert f"AutoTokenizer.from_pretrained({str(tmp_path)!r}).save_pretrained" in str(error.value)


def test_broken_vocabulary(files: Path, tmp_path: Path) -> None:
    path = make(files, tmp_path, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"}, vocab={"a": "b"})
    with pytest.raises(ConfigError, match=r"vocab\.json and merges\.txt are not a tokenizer"):
        ExactTokenizer.from_dir(path)
