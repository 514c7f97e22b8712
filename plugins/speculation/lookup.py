"""`speculation=lookup`: drafts what followed the last few tokens where they occurred before, in plain Python.

The last ``match_tokens`` tokens of a request are looked up in its own text (prompt lookup decoding; Saxena, 2023), with
a dict for each request. It is the simplest proposer that needs no scan of the text. `speculation=ngram` also looks up
shorter groups of tokens, with arrays for all requests: it gains more, and is faster where many requests run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minisgl.core import Req
from minisgl.hooks import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class Lookup:
    """Drafts copied from an earlier place in the same request, looked up in a dict."""

    max_drafts: int = 8
    """Largest number of draft tokens of a request in one step."""
    match_tokens: int = 3
    """Number of tokens that must be equal at both places."""

    def __post_init__(self) -> None:
        for name in ("max_drafts", "match_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"speculation.{name}={value} must be at least 1.")

    def build(self) -> LookupProposer:
        return LookupProposer(self.max_drafts, self.match_tokens)


class Text:
    """The tokens of one running request, and an index of its groups.

    A group is ``match_tokens`` consecutive tokens. ``after`` maps a group to the index of the token that followed its
    latest occurrence. The group at the end of the text is no entry yet, unless it occurred before: no token follows it.
    """

    def __init__(self, match_tokens: int):
        self.match_tokens = match_tokens
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    # lab: draft.index
    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and index every group that has a token after it now."""
        # 1. Before a token is appended, the last `match_tokens` tokens are a group, and the token will follow it. A
        #    text with fewer tokens has no group.
        # 2. A later occurrence of a group replaces an earlier one. Do not read the whole text again.
        for token in tokens:
            if len(self.tokens) >= self.match_tokens:
                self.after[tuple(self.tokens[-self.match_tokens :])] = len(self.tokens)
            self.tokens.append(token)

    # lab: end

    # lab: draft.copy
    def copy(self, count: int) -> list[int]:
        """Return guesses for the next ``count`` tokens of the text, or [] if its last group did not occur before.

        ``count`` may be 0.
        """
        # 1. Look up where the last group occurred before, and copy the tokens that followed it.
        # 2. If the copy reaches the end of the text, it goes on with the guesses themselves: 1 2 1 2 1 goes on with
        #    2 1 2 1. So there are always `count` guesses.
        start = self.after.get(tuple(self.tokens[-self.match_tokens :]))
        if start is None:
            return []
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(count)]

    # lab: end


class LookupProposer(DraftProposer):
    """The proposer; see `DraftProposer`. ``texts`` maps the uid of each request to its text."""

    def __init__(self, max_drafts: int, match_tokens: int):
        self.max_drafts, self.match_tokens = max_drafts, match_tokens
        self.texts: dict[int, Text] = {}

    def new_text(self) -> Text:
        """Return an empty text."""
        return Text(self.match_tokens)

    # lab: draft.turn
    def admitted(self, req: Req) -> None:
        """Note a request that begins to run, or runs again after a retraction."""
        # 1. `req.tokens()` is an array of the prompt and of the output that the request already has: none when it
        #    begins, some when it runs again.
        self.texts[req.uid] = self.new_text()
        self.texts[req.uid].append(req.tokens().tolist())

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        """Note the tokens that each request gained, one or several."""
        # 2. The time of a turn, a call of `advanced` and one of `propose`, must not grow with the text, however many
        #    tokens a request gains: use `tokens`, not `req.tokens()`.
        for req, run in zip(reqs, tokens, strict=True):
            self.texts[req.uid].append(run)

    def removed(self, req: Req) -> None:
        """Note a request that does not run any more. It was admitted before."""
        # 3. Nothing of the request may stay.
        del self.texts[req.uid]

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the drafts of each request: guesses for ``positions[i]`` and after it, ``limits[i]`` of them, or none.

        ``limits[i]`` is at most ``max_drafts``, and may be 0. `propose` changes nothing: neither the arguments, of
        which ``positions`` and ``limits`` are lists, nor the result of another call.
        """
        # 4. `positions[i]` is the length of the request's text, or one more: then the token before it is sampled, but
        #    unread. The first guess is for that token, and is no draft.
        drafts = []
        for req, position, limit in zip(reqs, positions, limits, strict=True):
            text = self.texts[req.uid]
            unread = position - len(text.tokens)
            drafts.append(text.copy(unread + limit)[unread:])
        return drafts

    # lab: end


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "speculation", "lookup", Lookup
