"""Regular expressions as parts of a grammar: the constructs that are regular and that all dialects share."""

from __future__ import annotations

import re
from collections.abc import Callable

from minisgl.plugins.grammar.characters import ALL, CharacterSet, complement, minus, union
from minisgl.plugins.grammar.network import Expression, choice, repeat, sequence

MAX_REPEATS = 10_000
"""The largest number in braces."""
_MAX_DEPTH = 100
_DIGIT = union([(ord("0"), ord("9"))])
_WORD = union([*_DIGIT, (ord("a"), ord("z")), (ord("A"), ord("Z")), (ord("_"), ord("_"))])
_SPACE = union(
    [(0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
     (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
)  # fmt: skip
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROL = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00, "a": 0x07}
_BRACES = re.compile(r"\{(\d+)(,?)(\d*)\}")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")


class RegexError(ValueError):
    """A regular expression is wrong, or has a construct that is not supported. The text says which, and where."""


def parse(pattern: str, characters: Callable[[CharacterSet], Expression], *, anchored: bool) -> Expression:
    """Return the texts that match ``pattern``. Raise `RegexError` if it can't be read.

    ``characters(set)`` gives one character of a set, so that the caller chooses its form. If ``anchored``, the pattern
    matches the whole text, as with `re.fullmatch`; otherwise any part of it, as with `re.search`. ``\\d`` and ``\\w``
    are ASCII, as in JSON schema; ``\\s`` is any white space, and ``.`` any character but a line feed.
    """
    return _Parser(pattern, characters, anchored).parse()


class _Parser:
    def __init__(self, pattern: str, characters: Callable[[CharacterSet], Expression], anchored: bool):
        self._text, self._at, self._depth = pattern, 0, 0
        self._characters = characters
        self._any = sequence() if anchored else repeat(characters(ALL))

    def parse(self) -> Expression:
        result = self._alternatives()
        if self._at < len(self._text):
            raise self._error("an unmatched )")
        return result

    def _error(self, what: str) -> RegexError:
        return RegexError(f"The regular expression has {what}, at character {self._at + 1}.")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at == len(self._text):
            raise self._error("no end: something is missing")
        self._at += 1
        return self._text[self._at - 1]

    def _accept(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _alternatives(self) -> Expression:
        parts = [self._concatenation()]
        while self._accept("|"):
            parts.append(self._concatenation())
        return parts[0] if len(parts) == 1 else choice(*parts)

    def _concatenation(self) -> Expression:
        """Read one alternative. Outside of groups, it may begin with ``^`` and end with ``$``."""
        outside = self._depth == 0
        parts = [sequence() if outside and self._accept("^") else self._any] if outside else []
        ended = False
        while self._at < len(self._text) and self._peek() not in "|)":
            if self._accept("$"):
                if not outside or self._peek() not in ("", "|"):
                    raise self._error("a $ that is not at its end")
                ended = True
            else:
                parts.append(self._quantified(self._atom()))
        if outside and not ended:
            parts.append(self._any)
        return sequence(*parts)

    def _quantified(self, atom: Expression) -> Expression:
        while True:
            least, most = 0, None
            if self._accept("*"):
                pass
            elif self._accept("+"):
                least = 1
            elif self._accept("?"):
                most = 1
            elif braces := _BRACES.match(self._text, self._at):
                least = int(braces[1])
                most = least if not braces[2] else int(braces[3]) if braces[3] else None
                if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
                    raise self._error(f"a wrong or too large number in {braces[0]} (at most {MAX_REPEATS})")
                self._at = braces.end()
            else:
                return atom
            if self._accept("+"):
                raise self._error("a possessive quantifier, which is not supported")
            self._accept("?")  # the same texts match, whether it is greedy or not
            atom = repeat(atom, least, most)

    def _atom(self) -> Expression:
        symbol = self._take()
        match symbol:
            case "(":
                return self._group()
            case "[":
                return self._one_of(self._set())
            case ".":
                return self._characters(complement(union([(0x0A, 0x0A)])))
            case "\\":
                return self._one_of(self._escape())
            case "*" | "+" | "?":
                raise self._error(f"a {symbol} with nothing before it")
            case "^":
                raise self._error("a ^ that is not at its beginning")
        return self._characters(((ord(symbol), ord(symbol)),))

    def _one_of(self, found: CharacterSet) -> Expression:
        if not found:
            raise self._error("a set without a character")
        return self._characters(found)

    def _group(self) -> Expression:
        if self._peek() == "?":
            group = _GROUP.match(self._text, self._at)
            if group is None:
                raise self._error("a lookaround, a flag or another group that is not supported")
            self._at = group.end()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error("too many groups inside each other")
        inside = self._alternatives()
        self._depth -= 1
        if not self._accept(")"):
            raise self._error("an unmatched (")
        return inside

    def _escape(self) -> CharacterSet:
        """Return the characters of the escape sequence after a backslash."""
        symbol = self._take()
        if symbol.lower() in _CLASSES:
            found = _CLASSES[symbol.lower()]
            return complement(found) if symbol.isupper() else found
        if symbol in _CONTROL:
            return ((_CONTROL[symbol], _CONTROL[symbol]),)
        if symbol in "xu":
            digits = self._text[self._at : self._at + (2 if symbol == "x" else 4)]
            if not re.fullmatch("[0-9A-Fa-f]{2}|[0-9A-Fa-f]{4}", digits):
                raise self._error(f"a wrong \\{symbol}")
            self._at += len(digits)
            value = int(digits, 16)
            if 0xD800 <= value <= 0xDFFF:
                raise self._error("half of a surrogate pair")
            return ((value, value),)
        if symbol.isalnum():
            raise self._error(f"\\{symbol}, which is not supported")
        return ((ord(symbol), ord(symbol)),)

    def _set(self) -> CharacterSet:
        """Read a set of characters in brackets, after the opening one."""
        inverted = self._accept("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            if self._peek() == "[" and self._text[self._at + 1 : self._at + 2] in (":", "."):
                raise self._error("a named class of characters, which is not supported")
            symbol = self._take()
            part = self._escape() if symbol == "\\" else ((ord(symbol), ord(symbol)),)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                symbol = self._take()
                last = self._escape() if symbol == "\\" else ((ord(symbol), ord(symbol)),)
                if len(part) != 1 or len(last) != 1 or part[0][0] != part[0][1] or part[0][0] > last[0][1]:
                    raise self._error("a wrong range of characters")
                part = ((part[0][0], last[0][1]),)
            ranges += part
            first = False
        self._at += 1
        found = minus(union(ranges), ((0xD800, 0xDFFF),))
        return complement(found) if inverted else found
