"""Finds stop strings in text that comes in pieces, and holds back only what may still become one.

Knows characters and nothing of tokens: where the pieces are cut makes no difference to what is found.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for the first of some stop strings to be complete; of several that end at the same character, the longest.

    Each string is matched by the algorithm of Knuth, Morris and Pratt (1977), so that a character costs amortised
    constant time for each string, however long it is. After a find, the finder is spent.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece. Returns the text that is safe to show, and the stop string that was found, if one was:
        then nothing from its first character on is shown, now or later."""
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
                return buffer[: end - len(found)], found
        safe = len(buffer) - max(self._matched, default=0)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """The text that was held back; to be called when no more will come."""
        held, self._held = self._held, ""
        return held


def _borders(word: str) -> list[int]:
    """For each prefix of the word, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        length += word[i] == word[length]
        borders[i] = length
    return borders
