"""Masks: equal to those found by trying every token, and equal in both plugins."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import regex

from minisgl.plugins.grammar.base import Grammars
from minisgl.sampling_params import Grammar, InvalidRequestError
from minisgl.scheduler.base import Constraint
from minisgl.tokenizer.tokenizer import Tokenizer
from tests.plugins.grammar.conftest import VOCAB_SIZE

PATTERNS = ["(yes|no|maybe)", "[a-z]{2,8}( [a-z]+)*", r"\d{4}-\d{2}-\d{2}", "[^a]*é+", r"(\w+@\w+\.(com|org)\n)+"]
SCHEMAS = [
    {"type": "object"},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "größe"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
    },
    {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}]}, "maxItems": 4},
    {
        "$defs": {"node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }},
        "$ref": "#/$defs/node",
    },
]  # fmt: skip
GRAMMARS = [
    *(Grammar("regex", pattern) for pattern in PATTERNS),
    *(Grammar("json_schema", json.dumps(schema)) for schema in SCHEMAS),
    Grammar("choice", json.dumps(["red", "green", "grün", "red wine", '"quoted"', "two\nlines"])),
]


def allowed(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool)


def answers(
    matchers: list[Constraint],
    tokenizer: Tokenizer,
    rng: random.Random,
    check: Callable[[bytes, npt.NDArray[np.bool_]], None],
) -> bytes:
    """Sample one answer of at most 40 tokens. Call ``check(text, allowed)`` before each token."""
    text = b""
    for _ in range(40):
        masks = [matcher.masks([]) for matcher in matchers]
        assert all((mask == masks[0]).all() for mask in masks), text
        tokens = allowed(masks[0][0])
        check(text, tokens)
        token = rng.choice(np.flatnonzero(tokens).tolist())
        if token in tokenizer.eos_ids:
            break
        drafts = [token, *rng.sample(range(VOCAB_SIZE), 2)]
        counts = {matcher.allowed(drafts) for matcher in matchers}
        assert counts == {Constraint.allowed(matchers[0], drafts)}, "as many as the masks allow"
        for matcher in matchers:
            check_forced(matcher, tokenizer)
        drafted = [matcher.masks(drafts) for matcher in matchers]
        assert all((each == drafted[0]).all() for each in drafted), text
        for matcher in matchers:
            matcher.advance([token])
        assert (matchers[0].masks([])[0] == drafted[0][1]).all(), "masks after drafts are those after the tokens"
        text += tokenizer.decoded_bytes(token)
    return text


def check_forced(matcher: Constraint, tokenizer: Tokenizer) -> None:
    """Check that no other text than that of the forced tokens is allowed."""
    forced = list(matcher.forced(5))
    text = b"".join(tokenizer.decoded_bytes(token) for token in forced)
    assert len(forced) <= 5 and matcher.allowed(forced) == len(forced)
    for token in np.flatnonzero(allowed(matcher.masks([])[0])).tolist() if forced else []:
        data = tokenizer.decoded_bytes(token)
        assert text.startswith(data) or data.startswith(text), (text, data)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_equal_to_trying_every_token(pattern: str, plain: Grammars, tokenizer: Tokenizer) -> None:
    """A token is allowed if, and only if, what was written and the token are the beginning of a match.

    The oracle is the package `regex`, which finds partial matches. It reads characters, so tokens that end inside one
    are not checked here.
    """
    exact = regex.compile(pattern, regex.ASCII if r"\w" in pattern else 0)

    def check(text: bytes, tokens: npt.NDArray[np.bool_]) -> None:
        for token in range(VOCAB_SIZE):
            data = tokenizer.decoded_bytes(token)
            try:
                begin = (text + data).decode()
            except UnicodeDecodeError:
                continue
            possible = bool(data) and exact.fullmatch(begin, partial=True) is not None
            ends = token in tokenizer.eos_ids and exact.fullmatch(text.decode()) is not None
            assert tokens[token] == (possible or ends), (text, data)

    rng = random.Random(pattern)
    ids = sorted(tokenizer.eos_ids)
    for _ in range(3):
        answers([plain.constraint(Grammar("regex", pattern), VOCAB_SIZE, ids)], tokenizer, rng, check)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text[:40])
def test_both_plugins_allow_the_same(grammar: Grammar, plain: Grammars, fast: Grammars, tokenizer: Tokenizer) -> None:
    rng, ids = random.Random(grammar.text), sorted(tokenizer.eos_ids)
    for each in (plain, fast):
        each.check(grammar)
    for _ in range(10):
        text = answers(
            [each.constraint(grammar, VOCAB_SIZE, ids) for each in (plain, fast)], tokenizer, rng, lambda *_: None
        )
        assert text


def test_forced_text_has_the_tokens_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    """By default, llguidance allows one way to write a text that is certain: that of the tokenizer."""
    pytest.importorskip("llguidance")
    from minisgl.plugins.grammar.llguidance import LLGuidanceGrammars

    grammar = Grammar("choice", json.dumps(["prefix cache"]))
    made = LLGuidanceGrammars(tokenizer, forcing=True).constraint(grammar, VOCAB_SIZE, sorted(tokenizer.eos_ids))
    written = []
    while (tokens := np.flatnonzero(allowed(made.masks([])[0])).tolist()) != sorted(tokenizer.eos_ids):
        assert len(tokens) == 1
        written += tokens
        made.advance(tokens)
    assert written == tokenizer.encode("prefix cache", add_special_tokens=False)


def test_masks_of_more_tokens_than_the_tokenizer_has(plain: Grammars, fast: Grammars, tokenizer: Tokenizer) -> None:
    """Ids beyond the tokenizer's, which pad a model's vocabulary, are never allowed."""
    size, ids = VOCAB_SIZE + 77, sorted(tokenizer.eos_ids)
    for compiler in (plain, fast):
        made = type(compiler)(tokenizer) if compiler is plain else type(compiler)(tokenizer, False)  # type: ignore[call-arg]
        mask = made.constraint(Grammar("regex", r"[\s\S]*"), size, ids).masks([])
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert mask.shape == (1, -(-size // 32))
        assert bits[:VOCAB_SIZE].sum() > 1000 and bits[VOCAB_SIZE:].sum() == 0


@pytest.mark.parametrize("name", ["plain", "fast"])
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{", "response_format"),
        Grammar("json_schema", '{"not": {}}', "response_format"),
        Grammar("json_schema", "[" * 100_000, "response_format"),
        Grammar("regex", "(", "guided_regex"),
        Grammar("choice", "[]", "guided_choice"),
        Grammar("choice", '["", "a"]', "guided_choice"),
        Grammar("choice", json.dumps(["x"] * 5000), "guided_choice"),
    ],
    ids=lambda grammar: grammar.text[:20],
)
def test_refused_with_the_name_of_the_parameter(name: str, grammar: Grammar, request: pytest.FixtureRequest) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request.getfixturevalue(name).check(grammar)
    assert caught.value.field == grammar.field


def test_a_grammar_that_grows_too_large_forbids_everything(plain: Grammars, tokenizer: Tokenizer) -> None:
    """Then the request ends with an error, and no other does: an empty mask is how the scheduler learns it."""
    grammar = Grammar("regex", "(a|b)*a(a|b){14}")  # an automaton of 2^15 states
    made = plain.constraint(grammar, VOCAB_SIZE, sorted(tokenizer.eos_ids))
    token = {tokenizer.decoded_bytes(i): i for i in range(VOCAB_SIZE)}
    rng = random.Random(0)
    for _ in range(40_000):
        mask = made.masks([])
        if not mask.any():
            break
        made.advance([token[rng.choice([b"a", b"b"])]])
    assert not made.masks([]).any()
