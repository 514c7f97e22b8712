"""A text before the answer that belongs to the grammar's text: `Grammar.prefix`."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import InvalidRequestError
from minisgl.plugins.grammar.base import Grammars
from minisgl.plugins.grammar.plain import PlainGrammars
from minisgl.sampling_params import Grammar
from minisgl.tokenizer.tokenizer import Tokenizer

from .conftest import VOCAB_SIZE

SCHEMA = '{"type": "object", "properties": {"né": {"enum": ["page", "prefix"]}}, "required": ["né"]}'
TEXT = '{"né": "prefix"}'


@pytest.mark.parametrize("plugin", ["plain", "subset", "fast"])
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


@pytest.mark.parametrize("plugin", ["plain", "subset", "fast"])
@pytest.mark.parametrize("prefix", ["[", '{"né": "x', TEXT + " "])
def test_a_wrong_prefix(plugin: str, prefix: str, request: pytest.FixtureRequest) -> None:
    grammars: Grammars = request.getfixturevalue(plugin)
    with pytest.raises(InvalidRequestError) as refused:
        grammars.check(Grammar("json_schema", SCHEMA, prefix=prefix))
    assert refused.value.field == "messages"


def test_a_check_compiles_nothing_that_answers_use(tokenizer: Tokenizer) -> None:
    """`LLM` checks and answers with one compiler: the end of an answer is allowed, whatever was checked before."""
    grammars, ends = PlainGrammars(tokenizer), sorted(tokenizer.eos_ids)
    grammar = Grammar("regex", "ab", prefix="ab")
    grammars.check(grammar)
    (mask,) = grammars.constraint(grammar, VOCAB_SIZE, ends).masks([])
    assert [t for t in range(VOCAB_SIZE) if mask[t // 32] >> t % 32 & 1] == ends


def test_a_prefix_is_read_apart_from_the_answers(tokenizer: Tokenizer) -> None:
    """A thread reads it, while the scheduler's thread uses the automaton of the grammar's answers."""
    grammars = PlainGrammars(tokenizer)
    answering = grammars.constraint(Grammar("regex", "a{9}b"), VOCAB_SIZE, [0])
    answering.masks([])
    (compiled,) = grammars._kept.values()
    before = len(compiled.automaton._places)
    begun = grammars.constraint(Grammar("regex", "a{9}b", prefix="aaaaaaaaa"), VOCAB_SIZE, [0])
    assert begun.is_ready(60)
    assert len(compiled.automaton._places) == before
    assert begun.masks([]).any()
