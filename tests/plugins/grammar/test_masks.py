"""Masks: equal to those found by trying every token, and equal in both plugins."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import regex

from minisgl.plugins.constraint.base import Constraint
from minisgl.plugins.grammar import automaton as automaton_module
from minisgl.plugins.grammar import plain as plain_module
from minisgl.plugins.grammar.base import Grammars
from minisgl.plugins.grammar.subset import SubsetGrammars
from minisgl.sampling_params import Grammar, InvalidRequestError
from minisgl.testing.serving import patient_timeout
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
NODE = {"$defs": {"n": {"enum": ["x", "y"]}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}
OTHER = {"$defs": {"n": {"type": "integer", "maximum": 5}}, "$ref": "#/$defs/n"}
CALL = ['<tool_call>\n{"name": "', {"any_of": [["f", ' "'], "größe"]}, '", ', {"json_schema": NODE}, "}"]
FRAMES: list[Any] = [
    "a literal text",
    [{"json_schema": NODE}, " and ", {"json_schema": OTHER}],
    {"repeat": CALL, "separator": "\n"},
    {"any_of": [{"json_schema": OTHER}, {"repeat": CALL, "separator": ""}]},
]
GRAMMARS = [
    *(Grammar("frame", json.dumps(frame)) for frame in FRAMES),
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
def test_subset_allows_the_same(grammar: Grammar, plain: Grammars, subset: Grammars, tokenizer: Tokenizer) -> None:
    """The short plugin has the masks of `plain`, along an answer and after drafts."""
    rng = random.Random(grammar.text)
    one, other = (each.constraint(grammar, VOCAB_SIZE, sorted(tokenizer.eos_ids)) for each in (plain, subset))
    for _ in range(25):
        tokens = np.flatnonzero(allowed(one.masks([])[0])).tolist()
        drafts = [rng.choice(tokens), rng.randrange(VOCAB_SIZE)]
        if drafts[0] in tokenizer.eos_ids:
            break
        assert (one.masks(drafts)[:2] == other.masks(drafts)[:2]).all()
        assert one.allowed(drafts) == other.allowed(drafts)
        for each in (one, other):
            each.advance(drafts[:1])


def test_subset_has_no_dead_ends_and_bounded_work(subset: Grammars, tokenizer: Tokenizer) -> None:
    """A schema that only calls itself is refused; a mask that reads too many places ends its request only."""
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(InvalidRequestError, match="allows no text"):
        subset.check(Grammar("json_schema", json.dumps(endless)))
    small = SubsetGrammars(tokenizer, 300)
    assert not small.constraint(Grammar("regex", "(a|[a-z]+|b*){9}[0-9]*"), VOCAB_SIZE, [0]).masks([]).any()
    assert small.constraint(Grammar("regex", "ab"), VOCAB_SIZE, [0]).masks([]).any()


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


@pytest.mark.parametrize("name", ["plain", "subset", "fast"])
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


TREES = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/tree"}]}, "minItems": 9}
    },
}
STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 90}


@pytest.mark.parametrize(
    ("grammar", "states"),
    [
        (Grammar("regex", "(a|b)*a(a|b){14}"), 2000),  # an automaton of 2^15 states
        (Grammar("json_schema", json.dumps(STRINGS)), 2000),
        (Grammar("json_schema", json.dumps(TREES)), 120),
    ],
    ids=["many states", "many items", "recursive"],
)
def test_answers_of_one_grammar_do_not_fill_it_up(
    grammar: Grammar, states: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with equal grammars share an automaton. When it is full, all of them go on, with the same masks."""
    ends = sorted(tokenizer.eos_ids)
    unshared, compiler = plain_module.PlainGrammars(tokenizer), plain_module.PlainGrammars(tokenizer)
    alone = unshared.constraint(grammar, VOCAB_SIZE, ends)
    made = [compiler.constraint(grammar, VOCAB_SIZE, ends) for _ in range(2)]
    rng = np.random.default_rng(0)
    automata = {}
    for step in range(300):
        with monkeypatch.context() as patch:
            patch.setattr(automaton_module, "MAX_STATES", states)
            masks = [each.masks([])[0] for each in made]
        assert (masks[0] == alone.masks([])[0]).all(), step
        for index, mask in enumerate(masks):
            tokens = [token for token in np.flatnonzero(allowed(mask)).tolist() if token not in ends]
            if mask.any() and not tokens:  # the answer has ended: a new request begins
                made[index] = compiler.constraint(grammar, VOCAB_SIZE, ends)
                alone = alone if index else unshared.constraint(grammar, VOCAB_SIZE, ends)
                continue
            token = [int(rng.choice(tokens))]
            with monkeypatch.context() as patch:
                patch.setattr(automaton_module, "MAX_STATES", states)
                made[index].advance(token)
            if index == 0:
                alone.advance(token)
        (compiled,) = compiler._kept.values()
        automata[id(compiled.automaton)] = compiled.automaton
    assert len(automata) > 1


BRANCHES = "abcdefghij"
WORDS = Grammar("regex", "|".join(f"{first}[a-z]{{40}}{first}" for first in BRANCHES))


def test_the_states_of_other_answers_end_no_answer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In llguidance, too, answers share states, up to a limit. Each answer that fits alone fits after any others."""
    module = pytest.importorskip("minisgl.plugins.grammar.llguidance", exc_type=ImportError)
    pytest.importorskip("llguidance")
    monkeypatch.setitem(module.LIMITS, "max_lexer_states", 200)  # one answer needs up to 150
    compiler, ends, rng = (
        module.LLGuidanceGrammars(tokenizer, False),
        sorted(tokenizer.eos_ids),
        np.random.default_rng(0),
    )
    lexers = set()
    for answer, first in enumerate(BRANCHES):
        made, alone = (
            c._matcher(WORDS, VOCAB_SIZE, ends) for c in (compiler, module.LLGuidanceGrammars(tokenizer, False))
        )
        for step in range(12):
            drafts = [int(token) for token in rng.integers(3, VOCAB_SIZE, 2)]
            (mask, *more), (expected, *expected_more) = made.masks(drafts), alone.masks(drafts)
            assert expected.any() and (mask == expected).all(), (answer, step)
            assert not made.allowed(drafts) or (more[0] == expected_more[0]).all()
            tokens = [t for t in np.flatnonzero(allowed(mask)).tolist() if t not in ends]
            texts = [tokenizer.decoded_bytes(t) for t in tokens]
            token = tokens[texts.index(first.encode())] if step == 0 else int(rng.choice(tokens))
            made.advance([token])
            alone.advance([token])
        lexers.add(id(made._lexer))
    assert len(lexers) > 1


def test_simultaneous_answers_have_lexers_of_their_own(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of answers that share one are computed one after another. A slow compilation is not repeated."""
    module = pytest.importorskip("minisgl.plugins.grammar.llguidance", exc_type=ImportError)
    pytest.importorskip("llguidance")
    compiler = module.LLGuidanceGrammars(tokenizer, True)

    def lexers(text: str) -> list[object]:
        made = [compiler._matcher(Grammar("regex", text), VOCAB_SIZE, [0]) for _ in range(3)]
        return [each._lexer for each in made]

    monkeypatch.setattr(module, "QUICK_SECONDS", 1e9)
    first = lexers("(ab)+")
    assert len(set(map(id, first))) == 3
    assert {id(each) for each in lexers("(ab)+")} == {id(each) for each in first}  # no answer uses them any more
    monkeypatch.setattr(module, "QUICK_SECONDS", 0.0)
    assert len(set(map(id, lexers("(ba)+")))) == 1


# ---- the end of an answer, and tokens that are no text -------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "subset", "fast"])
def test_only_an_end_id_ends_and_only_where_the_grammar_does(
    name: str, request: pytest.FixtureRequest, tokenizer: Tokenizer
) -> None:
    """Each of several end ids is allowed in an accepting state, and nowhere else; other special tokens never are."""
    compiler: Grammars = request.getfixturevalue(name)
    ends = [sorted(tokenizer.eos_ids)[0], 5]  # token 5 has a text, and is an end id of the model
    made = compiler.constraint(Grammar("regex", "(ab)+"), VOCAB_SIZE, ends)
    token = {tokenizer.decoded_bytes(i): i for i in range(VOCAB_SIZE)}
    for text in (b"a", b"b", b"a", b"b"):
        made.advance([token[text]])
        tokens = set(np.flatnonzero(allowed(made.masks([])[0])).tolist())
        assert (set(ends) <= tokens) == (text == b"b")
        assert all(tokenizer.decoded_bytes(i) for i in tokens - set(ends))
        assert made.allowed([ends[1]]) == (text == b"b")
    assert made.allowed([token[b"a"], token[b"b"], ends[0], token[b"a"]]) == 3


@pytest.mark.parametrize("name", ["plain", "subset", "fast"])
def test_a_character_in_several_tokens(name: str, request: pytest.FixtureRequest, tokenizer: Tokenizer) -> None:
    """A character that has no token is written byte by byte, and no answer ends inside it."""
    compiler: Grammars = request.getfixturevalue(name)
    ends = sorted(tokenizer.eos_ids)
    made = compiler.constraint(Grammar("regex", "[😀-😂]"), VOCAB_SIZE, ends)
    byte = {tokenizer.decoded_bytes(i): i for i in range(VOCAB_SIZE) if len(tokenizer.decoded_bytes(i)) == 1}
    for value in "😁".encode():
        tokens = np.flatnonzero(allowed(made.masks([])[0])).tolist()
        assert byte[bytes([value])] in tokens and not set(ends) & set(tokens)
        made.advance([byte[bytes([value])]])
    assert np.flatnonzero(allowed(made.masks([])[0])).tolist() == ends


# ---- bounds --------------------------------------------------------------------------------------------------

HOSTILE = [
    Grammar("regex", "(a{1,1000}){1,1000}"),
    Grammar("regex", "(((((){10000}){10000}){10000}){10000}){10000}"),
    Grammar("regex", "(a{10000}){10000}"),
    Grammar("regex", "(a*)*" * 2000),
    Grammar("regex", r"[\s\S]*a[\s\S]{200}"),
    Grammar("regex", "|".join(f"w{i:05d}x" for i in range(7000))),
    Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 999983})),
    Grammar("json_schema", json.dumps({"type": "string", "pattern": r"^(\w|\s|[é-ü]){1,5000}$"})),
    Grammar("json_schema", json.dumps({"$ref": "#"})),
    Grammar("json_schema", json.dumps({"enum": [f"value number {i}" for i in range(2500)]})),
    Grammar(
        "json_schema", json.dumps({"type": "array", "maxItems": 9999, "items": {"type": "string", "maxLength": 9999}})
    ),
]


@pytest.mark.parametrize("name", ["plain", "fast"])
@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda grammar: grammar.text[:30])
def test_the_work_is_bounded(name: str, grammar: Grammar, request: pytest.FixtureRequest) -> None:
    """A grammar is refused, or it ends its request with an error, or each of its masks takes little processor time.

    All tokens are tried that the grammar may allow; the limit is far above the time on a machine without other work.
    """
    compiler: Grammars = request.getfixturevalue(name)
    began, refused = time.process_time(), None
    try:
        compiler.check(grammar)
    except InvalidRequestError as error:
        refused = error
    assert time.process_time() - began < patient_timeout(10)
    if refused is not None:
        assert refused.field == "grammar"
        return
    made, rng = compiler.constraint(grammar, VOCAB_SIZE, [0]), random.Random(0)
    for _ in range(10):
        mask = made.masks([])[0]
        made.forced(16)
        tokens = [token for token in np.flatnonzero(allowed(mask)).tolist() if token]
        if not tokens:
            break
        made.advance([rng.choice(tokens)])
    assert time.process_time() - began < patient_timeout(30)


@pytest.mark.parametrize("name", ["plain", "fast"])
def test_compiled_grammars_are_kept_but_not_all(
    name: str, request: pytest.FixtureRequest, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal grammars are compiled once, in a bounded memory; each answer still has its own state."""
    compiler: Any = request.getfixturevalue(name)
    monkeypatch.setattr(plain_module, "KEPT_BYTES", 1 << 20)
    token = {tokenizer.decoded_bytes(i): i for i in range(VOCAB_SIZE)}
    first, second = (compiler.constraint(Grammar("regex", "ab|b"), VOCAB_SIZE, [0]) for _ in range(2))
    first.advance([token[b"a"]])
    assert allowed(second.masks([])[0])[token[b"a"]] and not allowed(first.masks([])[0])[token[b"a"]]
    for number in range(300):
        grammar = Grammar("json_schema", json.dumps({"const": number}))
        compiler.check(grammar)
        assert compiler.constraint(grammar, VOCAB_SIZE, [0]).masks([]).any()
    assert 1 <= len(compiler._kept) <= 64
    assert len(compiler._checked) <= 128


def test_an_error_in_a_grammar_ends_its_request_only(plain: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on it allows no token, whatever is asked."""
    made = plain.constraint(Grammar("regex", "(ab)+"), VOCAB_SIZE, [0])
    assert made.masks([]).any()

    def broken(*_: object) -> None:
        raise RuntimeError("a defect in a library")

    with monkeypatch.context() as patched:
        patched.setattr(plain_module.PlainMatcher, "advance", broken)
        made.advance([1])
    assert not made.masks([1, 2]).any() and made.masks([1, 2]).shape == (3, VOCAB_SIZE // 32)
    assert (made.allowed([1]), list(made.forced(3))) == (0, [])
    assert plain.constraint(Grammar("regex", "(ab)+"), VOCAB_SIZE, [0]).masks([]).any()


@pytest.mark.parametrize("plugin", ["plain", "subset", "fast"])
def test_who_gets_a_mask_may_change_it(plugin: str, request: pytest.FixtureRequest, tokenizer: Tokenizer) -> None:
    """The rule that allows the beginning of a thought adds to the first mask (`AfterToken`)."""
    grammars: Grammars = request.getfixturevalue(plugin)
    matcher = grammars.constraint(Grammar("regex", "[a-z]{2,8}"), VOCAB_SIZE, sorted(tokenizer.eos_ids))
    first = matcher.masks([])
    before = first.copy()
    first[:] = -1
    assert (matcher.masks([]) == before).all()
