"""Regular expressions as automata over bytes, compared with the standard library's."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from minisgl.plugins.grammar.automaton import DEAD, START, Automaton
from minisgl.plugins.grammar.characters import utf8
from minisgl.plugins.grammar.network import Network
from minisgl.plugins.grammar.regex import RegexError, parse

ALPHABET = "abcxyz1.é😀- ü]\n\u2003"
PATTERNS = [
    "a|b", "(a|b)*c", "[a-c]{2,3}", "^a+$", "x?y+?z*", r"\d+\.\d{1,2}", "[^a]b", "(?:ab|c){2}", "a.c", "é+", "[é-ü]x",
    r"\w\W", "a{0}", "[]a]", r"[a\-z]", "[-a]", r"\u00e9|\x41", "(?P<n>a)b", "^b|c", "a(b|)c", "😀[😀-😂]", r"\s\S", "",
]  # fmt: skip


def matches(automaton: Automaton, text: str) -> bool:
    state = automaton.walk(START, text.encode())
    return state != DEAD and automaton.is_final(state)


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_same_texts_as_re(pattern: str, anchored: bool) -> None:
    """All texts of two characters of an alphabet, and some of more: `re.fullmatch` if anchored, else `re.search`."""
    automaton = Automaton(Network(parse(pattern, utf8, anchored=anchored)))
    ascii_only = pattern.replace("$", r"\Z").replace(r"\w", "[0-9A-Za-z_]").replace(r"\W", "[^0-9A-Za-z_]")
    exact = re.compile(ascii_only.replace(r"\d", "[0-9]"))
    search = exact.fullmatch if anchored else exact.search
    texts = ["".join(text) for count in range(3) for text in itertools.product(ALPHABET, repeat=count)]
    rng = random.Random(pattern)
    texts += ["".join(rng.choices(ALPHABET, k=count)) for count in (3, 4, 5) for _ in range(200)]
    assert [text for text in texts if matches(automaton, text) != bool(search(text))] == []


@pytest.mark.parametrize("anchored", [True, False])
def test_longer_texts(anchored: bool) -> None:
    """Also where counts and alternatives need more characters."""
    pattern = r"[A-Z][a-z]{2,4}( [a-z]+){0,2}|\d{4}-\d{2}-\d{2}"
    automaton = Automaton(Network(parse(pattern, utf8, anchored=anchored)))
    exact = re.compile(pattern)
    search = exact.fullmatch if anchored else exact.search
    for text in ["Abc", "Abcdef", "Abc de", "Abc d e f", "2024-01-31", "2024-1-31", "x2024-01-31x", "AAbcd", ""]:
        assert matches(automaton, text) == bool(search(text)), text


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "(?=a)", r"\1", "a{3,2}", "*", "a++", r"\b", "[z-a]", "a{99999}", "[", "\\", "a$b", "a^", "(?i)a",
     "[[:alpha:]]", r"[^\s\S]", r"\ud800", "(" * 200 + ")" * 200],
)  # fmt: skip
def test_refused(pattern: str) -> None:
    """What is wrong or not regular is refused with the place of it, never read as something else."""
    with pytest.raises(RegexError, match="at character"):
        parse(pattern, utf8, anchored=True)


def test_invalid_utf8_is_never_allowed() -> None:
    """A class of all characters allows whole characters: no surrogates, no overlong forms, nothing above U+10FFFF."""
    automaton = Automaton(Network(parse(r"[\s\S]", utf8, anchored=True)))
    for data in (b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\xe0\x80\x80"):
        assert automaton.walk(START, data) == DEAD, data
    for first in range(0x80, 0x110000, 997):
        if not 0xD800 <= first <= 0xDFFF:
            assert automaton.is_final(automaton.walk(START, chr(first).encode()))
