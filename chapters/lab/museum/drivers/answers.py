"""The masks of a structured answer, with a small vocabulary. A call is a sampled token, or a list of drafts.

A workload has the ``grammar`` and its ``rules`` (see `small_grammars`), the texts of the ``tokens``, and those that are
``ends``. The trace has a line for each mask: the text before it, and the tokens that it allows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.gates.grammar import Reading, World, judge_mask, unpacked
from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.grader.small_grammars import Grammar, make_grammar, network
from minisgl.chapters.lab.museum.calls import Note
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.grammar.automaton import Automaton

SYMPTOM = "Some answers end in the middle: the client gets half a JSON document."


class CountedAutomaton(Automaton):
    """An automaton that counts the bytes that are read."""

    read = 0

    def walk(self, state: int, text: bytes) -> int:
        """Return the state after ``text``."""
        self.read += len(text)
        return super().walk(state, text)


class RightMasks(World):
    """The masks that are right, by trying every token."""

    def __init__(self, workload: Mapping[str, Any]):
        self.grammar = Grammar(workload["grammar"], workload["rules"])
        self.tokens, self.ends = [text.encode("latin-1") for text in workload["tokens"]], workload["ends"]
        self.size = len(self.tokens)


@dataclass
class Answer:
    """One answer: its matcher, its automaton, and what has been read of it."""

    matcher: Any
    automaton: CountedAutomaton
    world: RightMasks
    reading: Reading


def load(file: Path) -> Any:
    """Return the module of a plugin file."""
    return PluginManager().add(str(file)).module


def start(module: Any, workload: Mapping[str, Any]) -> Answer:
    """Begin an answer."""
    world, automaton = RightMasks(workload), CountedAutomaton(network(workload["grammar"], workload["rules"]))
    masks = module.Masks(automaton, module.Vocabulary(world.tokens, world.size), world.ends)
    return Answer(module.WordMatcher(masks), automaton, world, Reading(world))


def call(answer: Answer, tokens: Any, note: Note) -> dict[str, int]:
    """Go on with a token, or ask for the masks of drafts. Return the bytes of the vocabulary that were read."""
    world, before = answer.world, answer.automaton.read
    drafts: list[int] = tokens if isinstance(tokens, list) else []
    if not isinstance(tokens, list):
        answer.matcher.advance([tokens])
        answer.reading = answer.reading.after(tokens)
    readings = [answer.reading]
    for draft in drafts:
        readings.append(readings[-1].after(draft))
    wrong: Broken | None = None
    for reading, mask in zip(readings, answer.matcher.masks(drafts), strict=True):
        got = unpacked(mask, world.size, "A mask")
        text = None if reading.text is None else reading.text.decode("latin-1")
        allowed = {token: world.tokens[token].decode("latin-1") for token in sorted(got)}
        note(text=text, allowed=allowed, ends=world.ends)
        try:
            if reading.text is not None:
                judge_mask(world, reading.text, got)
            elif got:
                seen = f"token {min(got)} is allowed."
                raise Broken("after-end", "After an end token, or one that is not allowed, no token may follow.", seen)
        except Broken as broken:
            wrong = wrong or broken
    if wrong is not None:
        raise wrong
    return {"walked": answer.automaton.read - before}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random grammar without dead ends, a random vocabulary, and a random answer."""
    tree: Any = ["any"]
    while '["any"]' in str(tree).replace("'", '"') or '"rule"' in str(tree).replace("'", '"'):
        tree, _ = make_grammar(rng, number)
    texts = ["".join(rng.choices("ab(1", k=rng.choice([1, 1, 2, 3]))) for _ in range(6 + number % 20)]
    workload: dict[str, Any] = {"grammar": tree, "rules": [], "tokens": texts}
    workload["ends"] = sorted(rng.sample(range(len(texts)), 2))
    world, calls = RightMasks(workload), list[Any]()
    reading = Reading(world)
    for _ in range(8):
        good = sorted(reading.tokens())
        calls.append(rng.choices(range(len(texts)), k=rng.randint(0, 2)))
        if not good:
            break
        calls.append(rng.choice(good))
        reading = reading.after(calls[-1])
    return {**workload, "calls": calls}
