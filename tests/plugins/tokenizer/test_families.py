"""Tokenizers in the form of public families have the tokens and the text that they have in transformers."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import SamplingParams
from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

from .families import FAMILIES

EXAMPLES = 60
PARTS = [
    "Hello", " world", "  ", "\n", "▁", "don't", " .", " ,", " n't", " ' ", "é", "e\u0301", "前缀", "🙂", "12345", " 7",
    "CAFÉ", "ﬁ", "\t", "<0x41>", "a", "def f(a):", "</s>", "<s>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "[SEP]",
    "<|box|>", "<|end|>", "<tool_call>", "<eos>", "<|user|>", "<image>", ">>ANSWER<<", ">>TITLE<<", "<fim_middle>",
]  # fmt: skip


@functools.cache
def both(name: str) -> tuple[ExactTokenizer, Any]:
    """Return a family's tokenizer as minisgl and as transformers loads it."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[name](Path(folder))
        ours = ExactTokenizer.from_dir(folder)
        assert ours is not None
        return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_of_texts(name: str) -> None:
    ours, theirs = both(name)

    @settings(deadline=None, max_examples=EXAMPLES)
    @given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.booleans())
    def check(text: str, special: bool) -> None:
        assert ours.encode(text, special) == theirs(text, add_special_tokens=special).input_ids

    check()
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == ({theirs.eos_token_id} if theirs.eos_token is not None else set())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
def test_text_of_ids(name: str, skip: bool) -> None:
    """The text at once is that of transformers, and the pieces of a stream are together this text."""
    ours, theirs = both(name)
    added = sorted(ours.raw.get_added_tokens_decoder())
    single = sorted(ours.fallback_bytes) or added
    pools = [st.integers(0, ours.vocab_size - 1), st.sampled_from(added), st.sampled_from(single)]

    @settings(deadline=None, max_examples=EXAMPLES)
    @given(st.lists(st.one_of(pools), max_size=12))
    def check(ids: list[int]) -> None:
        text = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip) == text
        stream = ours.stream((), SamplingParams(skip_special_tokens=skip))
        assert "".join([*map(stream.feed, ids), stream.flush()]) == text

    check()
