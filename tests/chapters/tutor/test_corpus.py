"""The training text of `tutor`: training and held-out text do not overlap, and tokens have the promised format."""

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

from minisgl.chapters.tutor import corpus, exercises, glossary, handbook, packing, phrasings
from minisgl.chapters.tutor.facts import KINDS
from minisgl.chapters.tutor.words import held_out
from minisgl.models.shipped import shipped, weights_dir


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Load the tokenizer of the shipped `tutor`."""
    return Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def conversations() -> list[corpus.Conversation]:
    """Generate 150 training conversations of each domain."""
    rng = random.Random(1)
    return [corpus.conversation(rng, domain, 1200) for domain in corpus.SHARES for _ in range(150)]


def render(messages: list[dict[str, str]], **options: bool) -> str:
    """Render messages with the shipped chat template."""
    settings = json.loads((weights_dir() / "tokenizer_config.json").read_text())
    return jinja2.Environment().from_string(settings["chat_template"]).render(messages=messages, **options)


def test_same_seed() -> None:
    """The same seed generates the same text, and another seed generates other text."""

    def text(seed: int) -> list[corpus.Conversation]:
        return [corpus.conversation(random.Random(seed), domain, 500) for domain in corpus.SHARES]

    assert text(3) == text(3) != text(4)
    assert corpus.exam("lookup", 3) == corpus.exam("lookup", 3) != corpus.exam("lookup", 3, seed=1)


def test_held_out_sums(conversations: list[corpus.Conversation]) -> None:
    """Training text has no held-out pair of summands in either order; the exam has only held-out pairs."""
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


def test_share_of_held_out_sums() -> None:
    """About a tenth of all pairs of summands is held out."""
    pairs = list(itertools.product(range(100), repeat=2))
    assert 0.07 < sum(exercises.sum_held_out(a, b) for a, b in pairs) / len(pairs) < 0.13


def test_held_out_phrasings(conversations: list[corpus.Conversation]) -> None:
    """Training text asks for terms in no held-out phrasing; the exam uses only held-out phrasings."""
    asked = [turn.user for talk in conversations for turn in talk.turns if turn.family in ("glossary", "unknown")]
    assert len(asked) > 200
    assert not [request for request in asked if phrasings.looks_held_out(request)]
    assert all(phrasings.looks_held_out(question.messages[0]["content"]) for question in corpus.exam("glossary", 50))


def test_held_out_names() -> None:
    """Names of two words in handbooks belong to the split of the handbook."""
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


def test_held_out_counts_and_copies() -> None:
    """Training text has no held-out text to copy and no held-out range to count."""
    rng = random.Random(5)
    seen = {exercises.copy(rng, "train")[1] for _ in range(2000)}
    assert not seen & {exercises.copy(rng, "heldout")[1] for _ in range(2000)}
    for _ in range(200):
        numbers = [int(word) for word in exercises.count(rng, "train")[1].split(", ")]
        if len(numbers) > 1:
            step = abs(numbers[1] - numbers[0])
            assert not held_out(f"count {numbers[0]} {numbers[-1]} {step}")


def test_handbook_answers() -> None:
    """A handbook contains the value of every fact, and no two facts answer the same question."""
    rng = random.Random(7)
    for length in (60, 600, 5000):
        book = handbook.write(rng, "heldout", length)
        assert len(book.text) <= max(length, 200)
        for fact in book.known:
            assert fact.value.lower() in book.text.lower()
            assert fact.value in fact.answer
        questions = {(fact.entity, ask) for fact in book.known for ask in fact.kind.asks}
        assert len(questions) == sum(len(set(fact.kind.asks)) for fact in book.known), "two facts have one question"


def test_variant() -> None:
    """The variant of a handbook differs in one line."""
    rng = random.Random(8)
    for _ in range(50):
        book = handbook.write(rng, "train", 1500)
        other, fact = book.variant(rng)
        changed = [pair for pair in zip(book.lines, other.lines, strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1
        assert fact in other.known
        assert fact not in book.known


def test_glossary() -> None:
    """Every term of the glossary has a unique name and a definition of reasonable length in ASCII."""
    assert len(glossary.TERMS) >= 60
    names = [name.lower() for term in glossary.TERMS for name in (term.name, *term.aliases)]
    assert len(names) == len(set(names)), "a name or an alias occurs twice"
    for term in glossary.TERMS:
        assert term.definition.endswith("."), term.name
        assert 30 < len(term.definition) < 220, term.name
        assert term.definition.isascii(), term.name


def test_refusals() -> None:
    """The terms that the model refuses to explain are not in the glossary."""
    rng = random.Random(9)
    names = {term.name.lower() for term in glossary.TERMS}
    for _ in range(2000):
        words = glossary.strange_term(rng, "train").split(" ", 1)
        assert (words[1] if words[0] in ("a", "an", "the") and len(words) > 1 else " ".join(words)).lower() not in names


def test_kinds_of_facts() -> None:
    """Every kind of fact states its value, and asks for its entity."""
    rng = random.Random(10)
    for kind in KINDS:
        fact = handbook.Fact(kind, kind.entity(rng, "heldout"), kind.value(rng, "heldout"))
        assert fact.value.lower() in fact.state(rng).lower()
        assert fact.entity.lower() in fact.ask(rng).lower()


def test_domain_shares() -> None:
    """Twenty consecutive rows contain each domain by its share of the training tokens."""
    rows = [packing.domain_of(row) for row in range(20)]
    assert {name: 5 * rows.count(name) for name in corpus.SHARES} == corpus.SHARES
    assert sum(corpus.SHARES.values()) == 100


def test_row_depends_on_number() -> None:
    """A row depends only on the seed and its number, not on the rows that are packed with it."""
    packer = packing.Packer(weights_dir() / "tokenizer.json", seed=3, length=512)
    together, alone = packer.rows(4, 3), packer.rows(6, 1)
    for left, right in zip(together, alone, strict=True):
        assert left.shape == (3, 512)
        np.testing.assert_array_equal(left[2:], right)
    assert together.tokens.min() >= 0
    assert (together.weights > 0).all()


def test_rows_follow_chat_template(tokenizer: Tokenizer, conversations: list[corpus.Conversation]) -> None:
    """Packed conversations have the tokens of the text that the chat template renders."""
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


def test_chat_template() -> None:
    """The chat template renders system messages, content in parts, and the generation prompt."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    text = render(messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_digits(tokenizer: Tokenizer) -> None:
    """No token contains two digits, and the vocabulary has 2048 tokens."""
    assert tokenizer.encode("2048").tokens == list("2048")
    multiple = [token for token in tokenizer.get_vocab() if sum(letter.isdigit() for letter in token) > 1]
    assert multiple == []
    assert tokenizer.get_vocab_size() == 2048


@pytest.mark.parametrize(
    "text", ["", " ", "a\n\n  b\t", "Grüße, 世界! 😀", "\x00\x7f", "def f(x):\n    return x  # é", "١٢٣ ½ ²"]
)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Any text survives encoding and decoding."""
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    """Each special token is a single id, and generation ends at the end tokens."""
    config = json.loads((weights_dir() / "generation_config.json").read_text())
    ids = [tokenizer.encode(name).ids for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [[0], [1], [2]]
    assert config["eos_token_id"] == [2, 0]


def test_game_answers(tokenizer: Tokenizer) -> None:
    """The answers of a game of chance differ in their first token, so the first token gives the odds."""
    for answers in (list(exercises.COLOR_ODDS), list("123456"), ["heads", "tails"]):
        assert len({tokenizer.encode(answer).ids[0] for answer in answers}) == len(answers)


def test_shipped_folders() -> None:
    """The folders of the shipped models are found by name and hold at most 10 MiB each."""
    assert "tutor" in shipped()
    for name in shipped():
        assert sum(path.stat().st_size for path in weights_dir(name).iterdir()) <= 10 * 2**20
    with pytest.raises(KeyError, match="tutor"):
        weights_dir("missing")


def test_path_imports_no_torch() -> None:
    """The path of the shipped weights is found without importing torch."""
    code = "import sys, minisgl.models.shipped; minisgl.models.shipped.weights_dir(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
