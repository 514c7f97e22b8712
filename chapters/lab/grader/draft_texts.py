"""Texts whose continuation a proposer guesses without a model, and the count of the steps that it saves.

Each text is a prompt and an answer that a model might give. `steps_of` replays the answer: in each step the proposer
drafts, the drafts count up to the first that differs from the answer, and one token more is gained. So the result
depends on the proposer only. Chapter 8 and lab `draft` use it. Knows no plugin.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from minisgl.core import Req, SamplingParams
from minisgl.plugins.speculation import DraftProposer

__all__ = ["TEXTS", "Replayed", "Text", "replay", "steps_of"]


class Text(NamedTuple):
    """A prompt, an answer to it, and a name for both."""

    name: str
    prompt: str
    answer: str


_CODE = """\
def total(prices, discount):
    result = 0
    for price in prices:
        result = result + price
    if discount:
        result = result - discount
    return result


def average(prices):
    result = 0
    for price in prices:
        result = result + price
    return result / len(prices)
"""

_HANDBOOK = """\
Handbook of the Riverside Library
The reading room opens at 9:30. The reading room closes at 18:00.
The chess club meets in room 12. The chess club is led by Maria.
The door code of the archive is 4071. You can borrow the atlas for 14 days.
The globe costs 35 euros. Bus 7 goes to the museum.
Dogs wait at the entrance. Umbrellas are dried in the cellar.
"""

_TABLE = """\
name | city | age
Ada | London | 36
Emmy | Erlangen | 53
Grace | New York | 85
Katherine | Hampton | 101
"""

TEXTS = (
    Text(
        "edit",
        f"Rename the variable result to amount, and change nothing else.\n\n{_CODE}",
        _CODE.replace("result", "amount"),
    ),
    Text(
        "quote",
        f"{_HANDBOOK}\nWhat does the handbook say about the chess club and the archive? Quote it.",
        "The handbook says: The chess club meets in room 12. The chess club is led by Maria. About the archive it "
        "says: The door code of the archive is 4071.",
    ),
    Text(
        "table",
        f"{_TABLE}\nWrite one JSON object for each line of the table.",
        "\n".join(
            f'{{"name": "{name}", "city": "{city}", "age": {age}}}'
            for name, city, age in (line.split(" | ") for line in _TABLE.splitlines()[1:])
        ),
    ),
    Text(
        "own words",
        f"{_HANDBOOK}\nExplain in your own words what a visitor should know first.",
        "Come after half past nine, leave your dog outside, and bring little money: most things here are free. If you "
        "like board games, ask for Maria. Big books may go home with you for two weeks.",
    ),
)
"""The texts on which lab `draft` is graded: three whose answers copy, and one whose answer does not."""

_TOKEN = re.compile(r" ?\w+|\s+|[^\w\s]")


def tokens_of(text: Text) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt and of the answer. A token is a word with the space before it, or a sign."""
    numbers: dict[str, int] = {}
    prompt, answer = (
        [numbers.setdefault(token, len(numbers)) for token in _TOKEN.findall(part)]
        for part in (text.prompt, text.answer)
    )
    return prompt, answer


class Replayed(NamedTuple):
    """What a replay counted: tokens of the answer, steps, and drafts, proposed and accepted, in each step."""

    tokens: int
    steps: int
    drafts: int
    accepted: int


def replay(proposer: DraftProposer, prompt: list[int], answer: list[int], uid: int = 1) -> Replayed:
    """Return the counts for an answer of which the proposer guesses as much as it can, in each step.

    Raise ValueError if it returns more drafts than it may.
    """
    req = Req(uid, np.array(prompt, np.int32), SamplingParams(max_tokens=len(answer)), uid)
    req.req_pool_idx = 0
    proposer.admitted(req)
    steps = drafts = accepted = 0
    while len(req.output_ids) < len(answer):
        done = len(req.output_ids)
        limit = min(proposer.max_drafts, len(answer) - done - 1)
        (guess,) = proposer.propose([req], [len(req)], [limit]) if limit else ([],)
        if len(guess) > limit:
            raise ValueError(f"{len(guess)} drafts, where {limit} are allowed")
        right = 0
        while right < len(guess) and guess[right] == answer[done + right]:
            right += 1
        gained = answer[done : done + right + 1]
        req.output_ids.extend(gained)
        proposer.advanced([req], [gained])
        steps, drafts, accepted = steps + 1, drafts + len(guess), accepted + right
    proposer.removed(req)
    return Replayed(len(answer), steps, drafts, accepted)


def steps_of(proposer: DraftProposer) -> dict[str, Replayed]:
    """Return the counts for each of `TEXTS`, by its name. The proposer is asked about one text after the other."""
    return {text.name: replay(proposer, *tokens_of(text), uid=uid) for uid, text in enumerate(TEXTS, 1)}
