"""A text before the answer that belongs to the grammar's text: `Grammar.prefix`."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import InvalidRequestError
from minisgl.plugins.grammar.base import Grammars
from minisgl.sampling_params import Grammar
from minisgl.tokenizer.tokenizer import Tokenizer

from .conftest import VOCAB_SIZE

SCHEMA = '{"type": "object", "properties": {"né": {"enum": ["page", "prefix"]}}, "required": ["né"]}'
TEXT = '{"né": "prefix"}'


@pytest.mark.parametrize("plugin", ["plain", "fast"])
def test_masks_after_a_prefix(plugin: str, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    """They are those after the same text as an answer, byte by byte, wherever the prefix ends."""
    grammars: Grammars = request.getfixturevalue(plugin)
    single = {tokenizer.decoded_bytes(token): token for token in range(VOCAB_SIZE)}
    for end in range(len(TEXT) + 1):
        grammar = Grammar("json_schema", SCHEMA, prefix=TEXT[:end])
        grammars.check(grammar)
        begun = grammars.constraint(grammar, VOCAB_SIZE, [0])
        answered = grammars.constraint(Grammar("json_schema", SCHEMA), VOCAB_SIZE, [0])
        answered.advance([single[bytes([byte])] for byte in TEXT[:end].encode()])
        assert np.array_equal(begun.masks([]), answered.masks([])), TEXT[:end]
        assert begun.masks([]).any()


@pytest.mark.parametrize("plugin", ["plain", "fast"])
@pytest.mark.parametrize("prefix", ["[", '{"né": "x', TEXT + " "])
def test_a_wrong_prefix(plugin: str, prefix: str, request: pytest.FixtureRequest) -> None:
    grammars: Grammars = request.getfixturevalue(plugin)
    with pytest.raises(InvalidRequestError) as refused:
        grammars.check(Grammar("json_schema", SCHEMA, prefix=prefix))
    assert refused.value.field == "messages"
