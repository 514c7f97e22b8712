"""Sets of characters, as UTF-8 and as they stand in a JSON string."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator

from minisgl.plugins.grammar.network import Expression, byte, choice, literal, rule, sequence

CharacterSet = tuple[tuple[int, int], ...]
"""Code points as ranges: the first and the last of each, sorted, without neighbours, without surrogates."""

_UTF8_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF))
_SHORT_ESCAPES = '"\\\b\f\n\r\t'


def union(ranges: Iterable[tuple[int, int]]) -> CharacterSet:
    """Return the set of all characters of some ranges, which may overlap."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(characters: CharacterSet) -> CharacterSet:
    """Return all characters that are not in the set."""
    found, low = [], 0
    for first, last in union([*characters, (0xD800, 0xDFFF)]):
        if low < first:
            found.append((low, first - 1))
        low = last + 1
    return (*found, (low, 0x10FFFF)) if low <= 0x10FFFF else tuple(found)


def minus(characters: CharacterSet, without: CharacterSet) -> CharacterSet:
    """Return the characters of the first set that are not in the second."""
    return complement(union([*complement(characters), *without]))


ALL: CharacterSet = complement(())
_NOT_RAW = union([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])  # never as themselves in a JSON string


@functools.cache
def utf8(characters: CharacterSet) -> Expression:
    """Return the UTF-8 bytes of one character of the set."""
    if len(characters) == 1 and characters[0][0] == characters[0][1]:
        return literal(chr(characters[0][0]).encode())
    parts = [
        sequence(*(byte(*each) for each in ranges))
        for low, high in characters
        for first, last in _UTF8_LENGTHS
        if max(low, first) <= min(high, last)
        for ranges in byte_ranges(chr(max(low, first)).encode(), chr(min(high, last)).encode())
    ]
    return rule(f"utf8 {characters}", choice(*parts))


@functools.cache
def quoted(characters: CharacterSet) -> Expression:
    """Return one character of the set as it stands in a JSON string: as itself, or as an escape sequence.

    Only characters that need an escape sequence have one: quote, backslash, and control characters.
    """
    escaped = [chr(c) for first, last in minus(characters, minus(ALL, _NOT_RAW)) for c in range(first, last + 1)]
    parts = [literal(json.dumps(c)[1:-1].encode()) for c in escaped if c in _SHORT_ESCAPES]
    parts += [
        sequence(literal(b"\\u00"), literal(f"{ord(c) >> 4}".encode()), _hex_digit(ord(c) & 15))
        for c in escaped
        if c not in '"\\'
    ]
    raw = minus(characters, _NOT_RAW)
    if not parts:
        return utf8(raw)
    return rule(f"quoted {characters}", choice(*parts, *([utf8(raw)] if raw else [])))


def _hex_digit(value: int) -> Expression:
    digits = {f"{value:x}", f"{value:X}"}
    return choice(*(literal(digit.encode()) for digit in sorted(digits)))


def byte_ranges(low: bytes, high: bytes, least: int = 0x80, most: int = 0xBF) -> Iterator[list[tuple[int, int]]]:
    """Yield sequences of byte ranges that together are all texts from ``low`` to ``high``, which are equally long.

    All bytes but the first are from ``least`` to ``most``, as in UTF-8.
    """
    first, last, rest = low[0], high[0], len(low) - 1
    if not rest or first == last:
        for tail in byte_ranges(low[1:], high[1:], least, most) if rest else [[]]:
            yield [(first, last), *tail]
        return
    lowest, highest = bytes([least]) * rest, bytes([most]) * rest
    if low[1:] != lowest:
        yield from ([(first, first), *tail] for tail in byte_ranges(low[1:], highest, least, most))
        first += 1
    after: list[list[tuple[int, int]]] = []
    if high[1:] != highest:
        after = [[(last, last), *tail] for tail in byte_ranges(lowest, high[1:], least, most)]
        last -= 1
    if first <= last:
        yield [(first, last), *[(least, most)] * rest]
    yield from after
