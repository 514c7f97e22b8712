"""Stop strings: `StopFinder` finds them in text that arrives in pieces.

The finder holds back only the text that may be the beginning of a stop string. It works on characters and knows nothing
about tokens, so a stop string that spans several pieces is found as well.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


class StopFinder:
    """A search for several stop strings in a growing text.

    The finder reports the stop string whose last character comes first in the text. If several stop strings end at the
    same character, it reports the longest of them. Each string is matched by the algorithm of Knuth, Morris and Pratt
    (1977), so each character of the text costs amortised constant time for each stop string, whatever the string's
    length. After the finder has reported a stop string, it must not be used again.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._include = include
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # for each stop string, how long a prefix of it ends the text
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add the next piece of text. Return the text that may be shown now, and the stop string found or None.

        If a stop string was found, the returned text ends before the stop string's first character, or with its last
        one if the finder shall ``include`` it. If none was found,
        the finder holds back the end of the text if a stop string may begin there.
        """
        buffer = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            found = ""
            for i, (stop, borders) in enumerate(self._stops):
                matched = self._matched[i]
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    found = max(found, stop, key=len)
                    matched = borders[matched - 1]
                self._matched[i] = matched
            if found:
                self._held = ""
                return buffer[: end if self._include else end - len(found)], found
        safe = len(buffer) - max(self._matched, default=0)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def ends_in(self, text: str) -> bool:
        """Return whether a stop string would end at the end of the next piece ``text``. The finder does not change."""
        return text != "" and any((self._held + text).endswith(stop) for stop, _ in self._stops)

    def flush(self) -> str:
        """Return the text that was held back. Call this after the last piece of text."""
        held, self._held = self._held, ""
        return held


@functools.lru_cache(maxsize=256)
def _borders(word: str) -> tuple[int, ...]:
    """Return, for each non-empty prefix of ``word``, the length of its longest border.

    A border of a string is a proper prefix of the string that is also a suffix of it. The cache lets the ``n`` choices
    of a request share the result.
    """
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        length += word[i] == word[length]
        borders[i] = length
    return tuple(borders)
