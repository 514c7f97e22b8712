"""The text that `tutor` learns: training and held-out text stay apart, and tokens are what the format promises."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from minisgl.course.tutor import corpus, exercises, glossary, handbook, packing, phrasings
from minisgl.course.tutor.facts import KINDS
from minisgl.course.tutor.words import held_out
from minisgl.models.shipped import shipped, weights_dir


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def conversations() -> list[corpus.Conversation]:
    rng = random.Random(1)
    return [corpus.conversation(rng, domain, 1200) for domain in corpus.SHARES for _ in range(150)]


def render(messages: list[dict[str, str]], **options: bool) -> str:
    settings = json.loads((weights_dir() / "tokenizer_config.json").read_text())
    return jinja2.Environment().from_string(settings["chat_template"]).render(messages=messages, **options)


def test_the_same_seed_writes_the_same_text() -> None:
    def text(seed: int) -> list[corpus.Conversation]:
        return [corpus.conversation(random.Random(seed), domain, 500) for domain in corpus.SHARES]

    assert text(3) == text(3) != text(4)
    assert corpus.exam("lookup", 3) == corpus.exam("lookup", 3) != corpus.exam("lookup", 3, seed=1)


def test_training_never_adds_a_held_out_pair_in_either_order(conversations: list[corpus.Conversation]) -> None:
    answers = [turn.answer for talk in conversations for turn in talk.turns if turn.family == "sum"]
    assert len(answers) > 200
    for answer in answers:
        a, b = (int(word) for word in answer.split(" = ")[0].split(" + "))
        assert not exercises.sum_held_out(a, b)
        assert not exercises.sum_held_out(b, a)
    for question in corpus.exam("sum", 100):
        a, b = (int(word) for word in question.answer.split(" = ")[0].split(" + "))
        assert exercises.sum_held_out(a, b)
        assert question.answer == f"{a} + {b} = {a + b}."


def test_held_out_pairs_are_a_tenth_of_all() -> None:
    pairs = list(itertools.product(range(100), repeat=2))
    assert 0.07 < sum(exercises.sum_held_out(a, b) for a, b in pairs) / len(pairs) < 0.13


def test_training_never_asks_for_a_term_in_a_held_out_phrasing(conversations: list[corpus.Conversation]) -> None:
    asked = [turn.user for talk in conversations for turn in talk.turns if turn.family in ("glossary", "unknown")]
    assert len(asked) > 200
    assert not [request for request in asked if phrasings.looks_held_out(request)]
    assert all(phrasings.looks_held_out(question.messages[0]["content"]) for question in corpus.exam("glossary", 50))


def test_handbooks_of_training_and_of_the_exam_share_no_two_word_name() -> None:
    rng = random.Random(2)
    for split in ("train", "heldout"):
        book = handbook.write(rng, split, 4000)
        people = [fact.value for fact in book.known if fact.kind.name == "birthday"] + [
            fact.entity for fact in book.known if fact.kind.name in ("floor", "label", "when")
        ]
        assert people
        for name in people:
            if " " in name and not name.endswith(
                ("tower", "hall", "room", "house", "dock", "office", "lot", "shed", "hut")
            ):
                assert held_out(name) == (split == "heldout"), name


def test_counting_and_copying_answers_are_held_out() -> None:
    rng = random.Random(5)
    seen = {exercises.copy(rng, "train")[1] for _ in range(2000)}
    assert not seen & {exercises.copy(rng, "heldout")[1] for _ in range(2000)}
    for _ in range(200):
        numbers = [int(word) for word in exercises.count(rng, "train")[1].split(", ")]
        if len(numbers) > 1:
            step = abs(numbers[1] - numbers[0])
            assert not held_out(f"count {numbers[0]} {numbers[-1]} {step}")


def test_every_question_about_a_handbook_has_its_answer_in_it() -> None:
    rng = random.Random(7)
    for length in (60, 600, 5000):
        book = handbook.write(rng, "heldout", length)
        assert len(book.text) <= max(length, 200)
        for fact in book.known:
            assert fact.value.lower() in book.text.lower()
            assert fact.value in fact.answer
        questions = {(fact.entity, ask) for fact in book.known for ask in fact.kind.asks}
        assert len(questions) == sum(len(set(fact.kind.asks)) for fact in book.known), "two facts answer one question"


def test_a_variant_differs_in_one_line() -> None:
    rng = random.Random(8)
    for _ in range(50):
        book = handbook.write(rng, "train", 1500)
        other, fact = book.variant(rng)
        changed = [pair for pair in zip(book.lines, other.lines, strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1
        assert fact in other.known
        assert fact not in book.known


def test_glossary_is_large_and_well_formed() -> None:
    assert len(glossary.TERMS) >= 60
    names = [name.lower() for term in glossary.TERMS for name in (term.name, *term.aliases)]
    assert len(names) == len(set(names)), "one word, one meaning"
    for term in glossary.TERMS:
        assert term.definition.endswith("."), term.name
        assert 30 < len(term.definition) < 220, term.name
        assert term.definition.isascii(), term.name


def test_refusals_never_meet_a_known_term() -> None:
    rng = random.Random(9)
    names = {term.name.lower() for term in glossary.TERMS}
    for _ in range(2000):
        words = glossary.strange_term(rng, "train").split(" ", 1)
        assert (words[1] if words[0] in ("a", "an", "the") and len(words) > 1 else " ".join(words)).lower() not in names


def test_every_kind_of_fact_can_be_stated_asked_and_answered() -> None:
    rng = random.Random(10)
    for kind in KINDS:
        fact = handbook.Fact(kind, kind.entity(rng, "heldout"), kind.value(rng, "heldout"))
        assert fact.value.lower() in fact.state(rng).lower()
        assert fact.entity.lower() in fact.ask(rng).lower()


def test_rows_hold_the_domains_by_their_shares() -> None:
    rows = [packing.domain_of(row) for row in range(20)]
    assert {name: 5 * rows.count(name) for name in corpus.SHARES} == corpus.SHARES
    assert sum(corpus.SHARES.values()) == 100


def test_a_row_is_the_same_wherever_it_is_written() -> None:
    packer = packing.Packer(weights_dir() / "tokenizer.json", seed=3, length=512)
    together, alone = packer.rows(4, 3), packer.rows(6, 1)
    for left, right in zip(together, alone, strict=True):
        assert left.shape == (3, 512)
        np.testing.assert_array_equal(left[2:], right)
    assert together.tokens.min() >= 0
    assert (together.weights > 0).all()


def test_rows_are_tokenized_as_the_chat_template_renders(
    tokenizer: Tokenizer, conversations: list[corpus.Conversation]
) -> None:
    for talk in conversations[::7]:
        if talk.raw:
            continue
        messages = [{"role": "system", "content": talk.system}] if talk.system is not None else []
        for turn in talk.turns:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        pieces = [text for text, _ in packing.segments(talk)]
        assert "".join(pieces) + "\n" == render(messages)
        ids = [token for text in pieces for token in tokenizer.encode(text).ids]
        assert ids == tokenizer.encode("".join(pieces)).ids


def test_template_takes_system_messages_parts_and_a_generation_prompt() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    text = render(messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2048").tokens == list("2048")
    multiple = [token for token in tokenizer.get_vocab() if sum(letter.isdigit() for letter in token) > 1]
    assert multiple == []
    assert tokenizer.get_vocab_size() == 2048


@pytest.mark.parametrize(
    "text", ["", " ", "a\n\n  b\t", "Grüße, 世界! 😀", "\x00\x7f", "def f(x):\n    return x  # é", "١٢٣ ½ ²"]
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_id_each(tokenizer: Tokenizer) -> None:
    config = json.loads((weights_dir() / "generation_config.json").read_text())
    ids = [tokenizer.encode(name).ids for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [[0], [1], [2]]
    assert config["eos_token_id"] == [2, 0]


def test_answers_of_games_differ_in_their_first_token(tokenizer: Tokenizer) -> None:
    for answers in (list(exercises.COLOR_ODDS), list("123456"), ["heads", "tails"]):
        assert len({tokenizer.encode(answer).ids[0] for answer in answers}) == len(answers)


def test_shipped_folders_are_small_and_found() -> None:
    assert "tutor" in shipped()
    for name in shipped():
        assert sum(path.stat().st_size for path in weights_dir(name).iterdir()) <= 10 * 2**20
    with pytest.raises(KeyError, match="tutor"):
        weights_dir("nobody")


def test_asking_for_the_path_imports_no_torch() -> None:
    code = "import sys, minisgl.models.shipped; minisgl.models.shipped.weights_dir(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
