"""The masks of a structured answer, with a small vocabulary. A call is a sampled token, or a list of drafts.

A workload has a ``grammar`` with its ``rules`` (see `small_grammars`), the texts of all ``tokens``, and the ids of the
end tokens, ``ends``. The rules call no rules. The plugin's own `Grammars` makes the matcher, as in a
server, where another request, whose end tokens are ``earlier``, came before. The trace has a line for each mask: the
text before it, and the tokens that it allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from minisgl.chapters.lab.gates.grammar import Reading, World, judge_mask, unpacked
from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.grader.small_grammars import Grammar, make_grammar
from minisgl.chapters.lab.museum.calls import Note, load_plugins
from minisgl.chapters.lab.museum.pieces import NAME
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.grammar.automaton import Automaton
from minisgl.sampling_params import Grammar as Asked

load = load_plugins
SYMPTOM = "Some answers end in the middle: the client gets half a JSON document."


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Count the bytes that automata read: the only element of the list."""
    read, walk = [0], Automaton.walk

    def counted(automaton: Automaton, state: int, text: bytes) -> int:
        read[0] += len(text)
        return walk(automaton, state, text)

    with mock.patch.object(Automaton, "walk", counted):
        yield read


def regex(tree: Any, rules: Sequence[Any]) -> str:
    """Return a grammar as a regular expression."""
    kind, *parts = tree
    if kind == "rule":
        return regex(rules[parts[0]], ())
    if kind == "range":
        return "[" + "-".join(f"\\x{byte:02x}" for byte in parts) + "]"
    if kind == "repeat":
        least, most = parts[1], "" if parts[2] < 0 else parts[2]
        return f"{regex(parts[0], rules)}{{{least},{most}}}"
    if kind == "text":
        inside = "".join(f"\\x{byte:02x}" for byte in parts)
    else:
        inside = ("" if kind == "seq" else "|").join(regex(part, rules) for part in parts)
    return f"(?:{inside})"


class SmallTokenizer:
    """A tokenizer whose tokens have any texts. None of them is special: also an end token has bytes."""

    skipped = frozenset[int]()

    def __init__(self, texts: Sequence[bytes], ends: Sequence[int]):
        self.texts, self.vocab_size, self.eos_ids = texts, len(texts), frozenset(ends)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self.texts[token]

    def decoded_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self.texts[token]


class RightMasks(World):
    """The masks that are right, by trying every token."""

    def __init__(self, workload: Mapping[str, Any]):
        self.grammar = Grammar(workload["grammar"], workload["rules"])
        self.tokens, self.ends = [text.encode("latin-1") for text in workload["tokens"]], workload["ends"]
        self.size = len(self.tokens)


@dataclass
class Answer:
    """One answer: its matcher, the masks that are right, and the text so far."""

    matcher: Any
    world: RightMasks
    reading: Reading


def start(manager: PluginManager, workload: Mapping[str, Any]) -> Answer:
    """Begin an answer, after that of a request with other end tokens. The matchers are made as by a server's thread."""
    world, asked = RightMasks(workload), Asked("regex", regex(workload["grammar"], workload["rules"]))
    tokenizer = SmallTokenizer(world.tokens, world.ends)
    grammars = manager.build("grammar", manager.make("grammar", NAME), tokenizer=tokenizer)
    grammars.check(asked)
    grammars._begun(asked, world.size, tuple(workload["earlier"])).masks([])
    return Answer(grammars._begun(asked, world.size, tuple(world.ends)), world, Reading(world))


def call(answer: Answer, tokens: Any, note: Note) -> dict[str, int]:
    """Go on with a token, or ask for the masks of drafts. Return the bytes of the vocabulary that were read."""
    world = answer.world
    drafts: list[int] = tokens if isinstance(tokens, list) else []
    with bytes_read() as read:
        if not isinstance(tokens, list):
            answer.matcher.advance([tokens])
            answer.reading = answer.reading.after(tokens)
        masks = answer.matcher.masks(drafts)
    readings = [answer.reading]
    for draft in drafts:
        readings.append(readings[-1].after(draft))
    wrong: Broken | None = None
    for reading, mask in zip(readings, masks, strict=True):
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
    return {"walked": read[0]}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random grammar without dead ends, a random vocabulary, and a random answer."""
    tree: Any = ["any"]
    while '["any"]' in str(tree).replace("'", '"') or '"rule"' in str(tree).replace("'", '"'):
        tree, _ = make_grammar(rng, number)
    texts = ["".join(rng.choices("ab(1", k=rng.choice([1, 1, 2, 3]))) for _ in range(6 + number % 20)]
    workload: dict[str, Any] = {"grammar": tree, "rules": [], "tokens": texts}
    workload["ends"] = sorted(rng.sample(range(len(texts)), 2))
    workload["earlier"] = sorted(rng.sample(range(len(texts)), 2))
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
