"""Lab draft: Guess the next tokens, for nothing.

Grade it:  python -m minisgl.lab test draft     (`hint draft` for a hint)
Serve it:  python -m minisgl plugins=my_draft.py speculation=mine
"""

# minisgl lab draft, skeleton 49c216080d (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minisgl.core import Req
from minisgl.hooks import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class Mine:
    """Drafts copied from an earlier place in the same request, looked up in a dict."""

    max_drafts: int = 8
    """Largest number of draft tokens of a request in one step."""
    match_tokens: int = 3
    """Number of tokens that must be equal at both places."""

    def __post_init__(self) -> None:
        for name in ("max_drafts", "match_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"speculation.{name}={value} must be at least 1.")

    def build(self) -> MyProposer:
        return MyProposer(self.max_drafts, self.match_tokens)


class Text:
    """The tokens of one running request, and an index of its groups.

    A group is ``match_tokens`` consecutive tokens. ``after`` maps a group to the index of the token that followed its
    latest occurrence. The group at the end of the text is no entry yet, unless it occurred before: no token follows it.
    """

    def __init__(self, match_tokens: int):
        self.match_tokens = match_tokens
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and index every group that has a token after it now."""
        # TODO draft.index
        # 1. Before a token is appended, the last `match_tokens` tokens are a group, and the token will follow it. A
        #    text with fewer tokens has no group.
        # 2. A later occurrence of a group replaces an earlier one. Do not read the whole text again.
        raise NotImplementedError

    def copy(self, count: int) -> list[int]:
        """Return guesses for the next ``count`` tokens of the text, or [] if its last group did not occur before.

        ``count`` may be 0.
        """
        # TODO draft.copy
        # 1. Look up where the last group occurred before, and copy the tokens that followed it.
        # 2. If the copy reaches the end of the text, it goes on with the guesses themselves: 1 2 1 2 1 goes on with
        #    2 1 2 1. So there are always `count` guesses.
        raise NotImplementedError


class MyProposer(DraftProposer):
    """The proposer; see `DraftProposer`. ``texts`` maps the uid of each request to its text."""

    def __init__(self, max_drafts: int, match_tokens: int):
        self.max_drafts, self.match_tokens = max_drafts, match_tokens
        self.texts: dict[int, Text] = {}

    def new_text(self) -> Text:
        """Return an empty text."""
        return Text(self.match_tokens)

    def admitted(self, req: Req) -> None:
        """Note a request that begins to run, or runs again after a retraction."""
        # TODO draft.turn
        # 1. `req.tokens()` is an array of the prompt and of the output that the request already has: none when it
        #    begins, some when it runs again.
        raise NotImplementedError

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        """Note the tokens that each request gained, one or several."""
        # TODO draft.turn
        # 2. The time of a turn, a call of `advanced` and one of `propose`, must not grow with the text, however many
        #    tokens a request gains: use `tokens`, not `req.tokens()`.
        raise NotImplementedError

    def removed(self, req: Req) -> None:
        """Note a request that does not run any more. It was admitted before."""
        # TODO draft.turn
        # 3. Nothing of the request may stay.
        raise NotImplementedError

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the drafts of each request: guesses for ``positions[i]`` and after it, ``limits[i]`` of them, or none.

        ``limits[i]`` is at most ``max_drafts``, and may be 0. `propose` changes nothing: neither the arguments, of
        which ``positions`` and ``limits`` are lists, nor the result of another call.
        """
        # TODO draft.turn
        # 4. `positions[i]` is the length of the request's text, or one more: then the token before it is sampled, but
        #    unread. The first guess is for that token, and is no draft.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "speculation", "mine", Mine
