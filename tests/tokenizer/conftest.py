"""Fixtures: model directories with a small tokenizer of each kind, readable by minisgl and by transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from minisgl.tokenizer.tokenizer import Tokenizer

KINDS = [Tokenizer]
"""The tokenizers that all tests of this folder are about: the core's, and that of ``tokenizer=auto`` if it is there."""
if importlib.util.find_spec("minisgl.plugins.tokenizer") is not None:
    from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

    KINDS.append(ExactTokenizer)

TEXT = [
    "Hello world, a page of the pool holds sixteen tokens.\n\nWer zuerst kommt, mahlt zuerst. ",
    "Le cache évite le travail déjà fait. 前缀缓存 0123456789 🙂👩‍🚀 don't can't <0x41>",
]


def byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", "<|eos|>", "<|end|>", "<|start|>"]
    raw.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    raw.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return raw


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Build a tokenizer like Llama 2's: a metaspace before each word, and byte tokens for unknown characters."""
    special = ["<unk>", "<|bos|>", "<|eos|>"]
    vocab = {token: i for i, token in enumerate(special + [f"<0x{i:02X}>" for i in range(256)])}
    merges = []
    for word in ("▁Hello", "▁world", "▁page"):
        for end in range(1, len(word) + 1):
            vocab.setdefault(word[end - 1], len(vocab))
            vocab.setdefault(word[:end], len(vocab))
            if end > 1 and (word[: end - 1], word[end - 1]) not in merges:
                merges.append((word[: end - 1], word[end - 1]))
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(special)
    raw.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    return raw


def save(raw: tokenizers.Tokenizer, folder: Path, template: Any = None, **config: Any) -> Path:
    raw.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>", **config}
    if template is not None:
        content["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[Tokenizer]:
    found: type[Tokenizer] = request.param
    return found


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece_like"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save(byte_level() if request.param == "byte_level" else sentencepiece_like(), folder)
