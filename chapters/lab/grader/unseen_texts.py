"""Prompts and answers of the four kinds of `draft_texts.TEXTS`, new in each run.

An answer edits code, quotes text, writes a table as JSON, or is in new words. Lab `draft` measures its number to
beat on them. Knows no plugin.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from minisgl.chapters.lab.grader.draft_texts import Text

__all__ = ["unseen_texts"]


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS = _words(
    "price item order user page token node edge row key value count total limit offset index buffer layer weight score "
    "name title author city street bridge garden tower market window engine river forest museum library archive ticket "
    "lamp table door roof cellar entrance globe atlas coin"
)
_VERBS = _words("opens closes starts ends returns moves waits leaves costs needs shows keeps")
_PLACES = _words("room hall cellar tower garden office kitchen gallery")
_PEOPLE = _words("Ada Emmy Grace Katherine Maria Alan Edsger Barbara Donald Lise Marie Niels Rosa Carl Sofia Leonhard")
_CITIES = _words("London Erlangen Hampton Berlin Paris Rome Oslo Vienna Madrid Lisbon Dublin Prague Athens Zurich")
_WORDS = [*_NOUNS, *_VERBS, *_PLACES, *_words("the a of and in to is with for at") * 4]


def unseen_texts(rng: random.Random, rounds: int = 4) -> Iterator[Text]:
    """Yield ``rounds`` times one text of each kind."""
    for _ in range(rounds):
        yield _edit(rng)
        facts = _facts(rng)
        page = "\n".join(" ".join(facts[i : i + 2]) for i in range(0, len(facts), 2))
        quoted = " It also says: ".join(rng.sample(facts, rng.randint(3, 5)))
        yield Text("quote", f"{page}\n\nWhat does the page say about this? Quote it.", f"The page says: {quoted}")
        yield _table(rng)
        sentences = [" ".join(rng.choices(_WORDS, k=rng.randint(5, 12))) for _ in range(rng.randint(3, 5))]
        yield Text("own words", f"{page}\n\nExplain in your own words what matters.", f"{'. '.join(sentences)}.")


def _edit(rng: random.Random) -> Text:
    """Return code in which a variable gets another name."""
    old, new, *nouns = rng.sample(_NOUNS, len(_NOUNS))
    lines = []
    for verb in rng.sample(_VERBS, rng.randint(2, 3)):
        one, other, third = rng.sample(nouns, 3)
        lines += [f"def {verb}({one}s, {other}):", f"    {old} = {rng.randint(0, 9)}", f"    for {one} in {one}s:"]
        for _ in range(rng.randint(1, 2)):
            lines.append(f"        {old} = {old} {rng.choice('+-*')} {rng.choice([one, third, f'{one}.{third}'])}")
        if rng.random() < 0.6:
            lines += [f"    if {other}:", f"        {old} = {old} - {other}"]
        lines += [f"    return {old}" + rng.choice(["", f" / len({one}s)"]), "", ""]
    code = "\n".join(lines)
    prompt = f"Rename the variable {old} to {new}, and change nothing else.\n\n{code}"
    return Text("edit", prompt, re.sub(rf"\b{old}\b", new, code))


def _facts(rng: random.Random) -> list[str]:
    """Return sentences of a handbook."""
    found = []
    for _ in range(rng.randint(8, 14)):
        noun, other = rng.sample(_NOUNS, 2)
        kinds = [
            f"The {noun} of the {other} {rng.choice(_VERBS)} at {rng.randint(1, 23)}:{rng.choice(['00', '15', '30'])}.",
            f"The {noun} is in the {rng.choice(_PLACES)} {rng.randint(1, 40)}.",
            f"You can borrow the {noun} for {rng.randint(2, 30)} days.",
            f"{rng.choice(_PEOPLE)} looks after the {noun} and the {other}.",
            f"The {noun} costs {rng.randint(2, 90)} euros.",
        ]
        found.append(rng.choice(kinds))
    return found


def _table(rng: random.Random) -> Text:
    """Return a table and its rows as JSON."""
    rows = [(name, rng.choice(_CITIES), rng.randint(18, 99)) for name in rng.sample(_PEOPLE, rng.randint(4, 8))]
    table = "\n".join(["name | city | age", *(f"{name} | {city} | {age}" for name, city, age in rows)])
    answer = "\n".join(f'{{"name": "{name}", "city": "{city}", "age": {age}}}' for name, city, age in rows)
    return Text("table", f"{table}\nWrite one JSON object for each line of the table.", answer)
