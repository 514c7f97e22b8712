"""The tokenizer of ``tutor``, and one grammar compiler of each plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.models.resolve import resolve_model
from minisgl.plugins.grammar.base import Grammars
from minisgl.plugins.grammar.plain import PlainGrammars
from minisgl.plugins.grammar.subset import SubsetGrammars
from minisgl.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 2048
"""The size of the masks: that of the vocabulary of ``tutor``."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.from_dir(Path(resolve_model("tutor")))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> Grammars:
    return PlainGrammars(tokenizer)


@pytest.fixture(scope="module")
def subset(tokenizer: Tokenizer) -> Grammars:
    return SubsetGrammars(tokenizer, 400_000)


@pytest.fixture(scope="module")
def fast(tokenizer: Tokenizer) -> Grammars:
    """llguidance, with all tokens allowed that its grammar allows, as in ``plain``."""
    pytest.importorskip("llguidance")
    from minisgl.plugins.grammar.llguidance import LLGuidanceGrammars

    return LLGuidanceGrammars(tokenizer, forcing=False)
