"""Gates of lab `grammar`: states, masks and answers, part by part, then the vocabulary of `tutor`, and the server.

The grammars of the first gates are random and small. What they allow is found by trying every token, with derivatives
of the grammar (`minisgl.chapters.lab.grader.small_grammars`). The work for a mask is counted in executed lines.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader import small_grammars
from minisgl.chapters.lab.grader.executed_lines import counted_lines
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import Served, check_called, check_idle
from minisgl.chapters.lab.grader.small_grammars import Grammar, make_grammar, make_text, network, shown
from minisgl.chapters.lab.grader.tutor_runs import generate
from minisgl.chapters.lab.grader.unseen_answers import unseen_answers
from minisgl.models.resolve import resolve_model
from minisgl.plugins.constraint.base import pack_mask
from minisgl.plugins.grammar.network import GrammarTooLargeError, Network, choice, literal, rule, sequence
from minisgl.sampling_params import Grammar as Asked
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.tokenizer import Tokenizer

WORK = 400_000
"""The option `max_work` of the gates that do not test it."""


@cache
def tutor_tokenizer() -> Tokenizer:
    """Return the tokenizer of `tutor`."""
    found = Tokenizer.from_dir(Path(resolve_model("tutor")))
    assert found is not None
    return found


def parts_of(student: Student, max_work: int = WORK) -> Any:
    """Return the student's module and the options of `Masks`: the classes `Automaton`, `Masks` and the matcher."""
    grammars = student.make(student.config(max_work=max_work), tokenizer=tutor_tokenizer())
    module = sys.modules[type(grammars).__module__]
    for name in ("Automaton", "Masks", "MyMatcher"):
        if not hasattr(module, name):
            seen = f"The file has no class `{name}`."
            raise Broken("lacks-class", "The file has the classes of the skeleton, with their arguments.", seen)
    return module


def text_of(values: Iterable[int]) -> str:
    """Return bytes as they are shown."""
    return repr(bytes(values).decode("latin-1"))


# ---- states -------------------------------------------------------------------------------------------------


def retried(make: Callable[[random.Random, int], dict[str, Any]]) -> Callable[[random.Random, int], dict[str, Any]]:
    """Return a function that makes another workload if one has too large a grammar."""

    def made(rng: random.Random, size: int) -> dict[str, Any]:
        while True:
            with contextlib.suppress(Invalid):
                return make(rng, size)

    return made


@retried
def make_states(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random grammar and texts that mostly follow it. The first workloads have certain grammars."""
    if size <= len(CORNERS):
        tree, rules = CORNERS[size - 1]
        tree, rules = json.loads(json.dumps(tree)), json.loads(json.dumps(rules))
    else:
        tree, rules = make_grammar(rng, size)
    grammar = Grammar(tree, rules)
    return {"grammar": tree, "rules": rules, "texts": [make_text(rng, grammar, 8) for _ in range(6)]}


A, B = ["text", 97], ["text", 98]
CORNERS: list[tuple[Any, Any]] = [
    (["text", 97, 98], []),
    (["repeat", ["repeat", A, 0, 1], 0, -1], []),  # a circle of edges that read nothing
    (["seq", ["rule", 0], A, ["rule", 0], B], [["any", ["text", 49], ["seq", ["text", 40], ["rule", 0], A]]]),
    (["any", ["seq", A, ["any"]], B], []),  # a dead end
    (["any", ["seq", A, ["rule", 0]], B], [["seq", ["text", 40], ["rule", 0], A]]),  # a rule that only calls itself
    (["seq", A, ["repeat", B, 0, -1]], []),  # may end, and may go on
    (["any", ["seq", A, ["rule", 0], A], ["seq", B, ["rule", 0], B]], [["any", ["seq"], ["text", 49]]]),
]
"""Grammars that the search always tries."""


def show_states(workload: dict[str, Any]) -> str:
    """Describe the grammar, its rules and the texts."""
    lines = [f"grammar: {shown(workload['grammar'])}"]
    lines += [f"  <{i}> is {shown(each)}" for i, each in enumerate(workload["rules"])]
    return "\n".join(lines + [f"text {text_of(each)}" for each in workload["texts"]])


def run_states(student: Student, workload: dict[str, Any]) -> None:
    """Compare the student's states along each text with the grammar's derivatives."""
    grammar = Grammar(workload["grammar"], workload["rules"])
    if not grammar.goes_on(grammar.tree) or not all(0 <= v < 256 for text in workload["texts"] for v in text):
        raise Invalid
    module = parts_of(student)
    automaton = module.Automaton(network(workload["grammar"], workload["rules"]))
    loose = Loose(network(workload["grammar"], workload["rules"]))
    known: dict[bytes, Any] = {}
    for text in workload["texts"]:
        state, walked = automaton.start(), []
        for i in range(len(text) + 1):
            before = bytes(text[:i])
            judge_state(automaton, state, grammar, loose, before)
            hashed(state)
            if known.setdefault(before, state) != state:
                seen = f"The text {text_of(before)} was read twice, and its two states are not equal."
                raise Broken("unequal", "Equal texts have equal states.", seen)
            if i < len(text):
                walked.append((state, hash(state), before))
                state = automaton.after(state, text[i])
        for old, value, before in walked:
            if hash(old) != value or bool(old) != grammar.goes_on(grammar.walk(before)):
                seen = f"The state of {text_of(before)} is another one after `after` was called with it."
                raise Broken("changes", "`after` does not change the state that it gets.", seen)


def hashed(state: Any) -> None:
    """Raise `Broken` if a state has no hash."""
    try:
        hash(state)
    except TypeError as error:
        raise Broken("unhashable", "A state is hashable, so that it can be a key of a dict.", f"{error}.") from error


def judge_state(automaton: Any, state: Any, grammar: Grammar, loose: Loose, text: bytes) -> None:
    """Compare one state with the derivative after its text."""
    tree = grammar.walk(text)
    alive, ends = grammar.goes_on(tree), grammar.ends(tree)
    promise = "A state is empty unless a text of the grammar goes on from it to an end."
    what = f"After {text_of(text)}, " if text else "At the start, "
    if bool(state) and not alive:
        if grammar.goes_on(tree, dead_ends=True) or loose.reaches(text):
            seen = "the state is not empty, although no text of the grammar has an end from here."
            raise Broken("dead-end", promise, what + seen)
        seen = "the state is not empty, although no text of the grammar begins so."
        raise Broken("stack" if loose.begins(text) else "many", promise, what + seen)
    if not bool(state) and alive:
        more = [value for value in range(256) if grammar.goes_on(grammar.after(tree, value))]
        goes_on = f" go on with {text_of(more[:1])}" if more else " end here"
        raise Broken("few", promise, f"{what}the state is empty, although a text of the grammar may{goes_on}.")
    final = bool(automaton.is_final(state)) if bool(state) else False
    if final != ends:
        seen = f"`is_final` returned {final}; expected {ends}."
        found = isinstance(state, frozenset) and has_end(state, loose.net.end)
        if found != final:
            raise Broken("final", "`is_final` says whether the text is a whole text of the grammar.", what + seen)
        if isinstance(state, frozenset):
            place = "has the network's end, which the text has not reached" if found else "lacks the network's end"
            cause = "few" if not found else "stack" if loose.ends(text) else "many"
            promise = "A state has every place that the text can have reached, and no other."
            raise Broken(cause, promise, f"{what}{seen} The state {place}.")
        raise Broken("final", "`is_final` says whether the text is a whole text of the grammar.", what + seen)


def has_end(state: Any, end: int) -> bool:
    """Return whether a state has the network's last node, with an empty stack of whatever kind."""
    return any(isinstance(place, tuple) and len(place) == 2 and place[0] == end and not place[1] for place in state)


DEEPEST, MOST_PLACES = 12, 2_000
"""Limits of the search for dead ends: the longest stack, and the places after a text."""


class Loose:
    """Which texts begin a grammar's text if a rule that ends may go on behind any of its calls: a common mistake."""

    def __init__(self, net: Network):
        self.net = net
        self.goes_on = {
            last: [after for calls in net.calls for name, after in calls if net.rules[name][1] == last]
            for _, last in net.rules.values()
        }

    def begins(self, text: bytes) -> bool:
        """Return whether this reading allows a beginning of a text."""
        return bool(self._nodes(text))

    def reaches(self, text: bytes) -> bool:
        """Return whether the network has a place after a text, perhaps one from which no end can be reached."""
        places = self._places({(0, ())})
        for value in text:
            edges = [(edge, stack) for node, stack in places for edge in self.net.reads[node]]
            places = self._places({(end, stack) for (low, high, end), stack in edges if low <= value <= high})
        return bool(places)

    def _places(self, new: set[tuple[int, tuple[int, ...]]]) -> set[tuple[int, tuple[int, ...]]]:
        """Return ``new`` and the places that are reached from them without reading a byte, without too deep stacks."""
        found: set[tuple[int, tuple[int, ...]]] = set()
        while new:
            node, stack = place = new.pop()
            if place in found or len(stack) > DEEPEST or len(found) > MOST_PLACES:
                continue
            found.add(place)
            new |= {(end, stack) for end in self.net.skips[node]}
            new |= {(self.net.rules[name][0], (end, *stack)) for name, end in self.net.calls[node]}
            if stack and node in self.goes_on:
                new.add((stack[0], stack[1:]))
        return found

    def ends(self, text: bytes) -> bool:
        """Return whether this reading allows a text."""
        nodes = self._nodes(text)
        return self.net.end in nodes or bool(nodes & self.goes_on.keys())

    def _nodes(self, text: bytes) -> set[int]:
        nodes = self._closed([0])
        for value in text:
            edges = [edge for node in nodes for edge in self.net.reads[node]]
            nodes = self._closed([end for low, high, end in edges if low <= value <= high])
        return nodes

    def _closed(self, nodes: list[int]) -> set[int]:
        found: set[int] = set()
        while nodes:
            node = nodes.pop()
            if node not in found:
                found.add(node)
                nodes += self.net.skips[node] + self.goes_on.get(node, [])
                nodes += [self.net.rules[name][0] for name, _ in self.net.calls[node]]
        return found


MOST_CALLS = 8_000
"""The calls of rules that an automaton may look up in a grammar with a rule that begins with itself."""


class _Calls(list[Any]):
    """The calls of a network, which count how often they are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        if self.reads > MOST_CALLS:
            seen = f"The rule x is (x a | a). A call of the automaton read the calls of rules {MOST_CALLS:,} times."
            raise Broken("endless", ENDLESS, seen)
        return super().__getitem__(index)


ENDLESS = "A rule that begins with itself raises GrammarTooLargeError."


def left_recursion(student: Student) -> None:
    """Check that a rule that begins with itself raises GrammarTooLargeError instead of growing without end."""
    module = parts_of(student)

    def body(net: Network, start: int) -> int:
        return choice(sequence(rule("x", body), literal(b"a")), literal(b"a"))(net, start)

    found = Network(rule("x", body))
    found.calls = _Calls(found.calls)
    try:
        automaton = module.Automaton(found)
        state = automaton.start()
        for _ in range(3):
            state = automaton.after(state, 97)
    except GrammarTooLargeError:
        return
    except RecursionError as error:
        raise Broken("endless", ENDLESS, "The rule x is (x a | a), and the code raised RecursionError.") from error
    if not isinstance(state, frozenset) and bool(state) and automaton.is_final(state):
        return  # an automaton of another kind, which has no trouble with such a rule
    seen = "The rule x is (x a | a). Three calls of `after` raised nothing."
    raise Broken("endless", ENDLESS, seen)


# ---- masks --------------------------------------------------------------------------------------------------


@retried
def make_mask(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random grammar, a random vocabulary, and texts whose masks are compared."""
    workload = make_states(rng, size)
    tokens = [rng.choices(small_grammars.ALPHABET, k=rng.choice([0, 1, 1, 2, 3, 5])) for _ in range(4 + size % 30)]
    grammar = Grammar(workload["grammar"], workload["rules"])
    tokens += [make_text(rng, grammar, 5) for _ in range(4)]  # tokens with which an answer may begin
    tokens += [list(rng.choice(tokens)) for _ in range(2)]  # different tokens with equal bytes
    more = rng.choice([0, 0, 1, 40])
    ends = rng.sample(range(len(tokens) + more), rng.choice([1, 1, 2]))
    return {**workload, "tokens": tokens, "more": more, "ends": ends}


def show_mask(workload: dict[str, Any]) -> str:
    """Describe the grammar, the vocabulary and the texts."""
    tokens = ", ".join(f"{i}: {text_of(each)}" for i, each in enumerate(workload["tokens"]))
    ends = ", ".join(map(str, workload["ends"]))
    size = len(workload["tokens"]) + workload["more"]
    return f"{show_states(workload)}\ntokens {tokens}\nend tokens {ends}, {size=}"


class World:
    """A workload's grammar and vocabulary, the student's masks of it, and the masks that are right."""

    def __init__(self, student: Student, workload: dict[str, Any]):
        self.grammar = Grammar(workload["grammar"], workload["rules"])
        self.tokens = [bytes(each) for each in workload["tokens"]]
        self.size, self.ends = len(self.tokens) + workload["more"], list(workload["ends"])
        valid = all(isinstance(end, int) and 0 <= end < self.size for end in self.ends) and self.ends
        if not valid or not self.grammar.goes_on(self.grammar.tree):
            raise Invalid
        self.module = parts_of(student)
        automaton = self.module.Automaton(network(workload["grammar"], workload["rules"]))
        self.masks = self.module.Masks(automaton, list(self.tokens), self.size, tuple(self.ends), WORK)
        self.automaton = automaton

    def state(self, text: Iterable[int]) -> Any:
        """Return the student's state after a text."""
        state = self.automaton.start()
        for value in text:
            state = self.automaton.after(state, value)
        return state

    def right(self, text: bytes) -> set[int]:
        """Return the tokens that may follow a text, found by trying every token."""
        tree = self.grammar.walk(text)
        found = set(self.ends) if self.grammar.ends(tree) else set()
        for token, more in enumerate(self.tokens):
            if more and token not in self.ends and self.grammar.goes_on(self.grammar.walk(text + more)):
                found.add(token)
        return found


def unpacked(mask: Any, size: int, what: str) -> set[int]:
    """Return the tokens of a mask. Raise `Broken` if it has not the form of a mask."""
    words = -(-size // 32)
    promise = "A mask is an array int32 [ceil(size / 32)]. Bit i of word w is token 32 w + i, and bits beyond are 0."
    if not isinstance(mask, np.ndarray) or mask.dtype != np.int32 or mask.shape != (words,):
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else repr(type(mask).__name__)
        raise Broken("form", promise, f"{what} is {got}; expected int32 [{words}].")
    bits = np.flatnonzero(np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")).tolist()
    if bits and bits[-1] >= size:
        raise Broken("form", promise, f"{what} allows token {bits[-1]}; the vocabulary has {size}.")
    return set(bits)


def run_masks(student: Student, workload: dict[str, Any]) -> None:
    """Compare the masks after each text, and after each of its beginnings, with those by trying every token."""
    world = World(student, workload)
    for text in workload["texts"]:
        for i in range(len(text) + 1):
            before = bytes(text[:i])
            if not world.grammar.goes_on(world.grammar.walk(before)):
                break
            got = unpacked(world.masks.mask(world.state(before)), world.size, "The mask")
            judge_mask(world, before, got)


def judge_mask(world: World, text: bytes, got: set[int], also: Sequence[tuple[str, set[int], str]] = ()) -> None:
    """Compare the tokens of a mask with the right ones, and name the mistake.

    ``also`` are (cause, tokens, words) of mistakes of the caller's part, which explain a mask of exactly these tokens.
    """
    right = world.right(text)
    if got == right:
        return
    promise = "A token may follow if a text of the grammar goes on with all of its bytes, and an end token at an end."
    what = f"After {text_of(text)}, " if text else "At the start, "
    for cause, explained, words in also:
        if got == explained:
            raise Broken(cause, promise, what + words)
    wrong, missing = sorted(got - right), sorted(right - got)
    ends, tokens = set(world.ends), world.tokens
    if wrong and set(wrong) <= ends:
        seen = f"the end token {wrong[0]} is allowed, although the text is not whole."
        raise Broken("end-early", promise, what + seen)
    if missing and set(missing) <= ends:
        seen = f"the end token {missing[0]} is forbidden, although the text is whole."
        raise Broken("end-missing", promise, what + seen)
    if got == ends & right and got:
        other = f"token {missing[0]}, {text_of(tokens[missing[0]])}"
        seen = f"only end tokens are allowed, although {other}, may follow too."
        raise Broken("end-only", promise, what + seen)
    if wrong:
        token = next(each for each in wrong if each not in ends)
        more = tokens[token] if token < len(tokens) else b""
        seen = f"token {token}, {text_of(more)}, is allowed, and no text of the grammar goes on so."
        if not more:
            raise Broken("empty", promise, f"{what}token {token} is allowed, which has no bytes.")
        first = world.grammar.goes_on(world.grammar.walk(text + more[:1]))
        raise Broken("whole-token" if first else "wrong", promise, what + seen)
    token = next(each for each in missing if each not in ends)
    seen = f"token {token}, {text_of(tokens[token])}, is forbidden, although a text of the grammar goes on so."
    repeated = {t for t in right if t not in ends and tokens.count(tokens[t]) > 1}
    inner = {t for t in right if t not in ends and any(o != tokens[t] and o.startswith(tokens[t]) for o in tokens)}
    longer = {t for t in right if t not in ends and len(tokens[t]) > 1}
    if set(missing) <= repeated and not set(missing) == inner & right:
        raise Broken("same-bytes", promise, f"{what}{seen} Another token has the same bytes.")
    if set(missing) == inner:
        raise Broken("inner", promise, f"{what}{seen} Another token begins with these bytes.")
    raise Broken("few-long" if set(missing) == longer else "wrong", promise, what + seen)


BEGINNINGS = 6_000
"""The tokens of the vocabulary whose work is counted."""
MOST_LINES = 6_000
"""The lines that a mask of this vocabulary may execute. The reference needs some hundred, and a loop over all tokens
three times as many as here."""


STATES = 700
"""The states of the grammar whose work is counted: more than are kept."""


def lines_of(student: Student, call: Callable[[], Any], most: int = 10**9) -> int:
    """Return how many lines of the student's file a call executes."""
    with counted_lines(student.path) as executed:
        before = executed()
        call()
        return executed() - before


def mask_work(student: Student) -> str:
    """Count the lines for masks of a vocabulary of which nearly nothing is allowed."""
    module = parts_of(student)
    letters = [bytes([97 + i % 26, 97 + i // 26 % 26, 97 + i // 676]) for i in range(BEGINNINGS)]
    automaton, size = module.Automaton(number(STATES + 10)), BEGINNINGS + 3
    scan = module.Masks(automaton, [*letters, b"0", b"12", b""], size, (size - 1,), WORK)
    states = [automaton.start()]
    for _ in range(STATES):
        states.append(automaton.after(states[-1], 49))
    promise = f"With {BEGINNINGS:,} tokens that no text goes on with, a mask executes at most {MOST_LINES:,} lines."
    scan.mask(states[0])  # what is prepared late is not counted
    lines = lines_of(student, lambda: scan.mask(states[1]))
    if lines > MOST_LINES:
        seen = f"{lines:,} lines. No token but two begins with a digit, and the grammar is a number."
        raise Broken("scan", promise, seen)
    again = lines_of(student, lambda: scan.mask(states[1]))
    if again > 100 and again > lines / 4:
        seen = f"The first mask of a state executed {lines:,} lines, and the second mask of the same state {again:,}."
        raise Broken("keep", "The mask of a state is computed once.", seen)
    for state in states[2:10]:
        scan.mask(state)
    later = lines_of(student, lambda: scan.mask(states[1]))
    if later > 100 and later > lines / 4:
        seen = (
            f"The first mask of a state executed {lines:,} lines, and, after those of 8 other states, {later:,} again."
        )
        raise Broken("keep", "The masks of KEPT_MASKS states are kept.", seen)
    long = b"1" * 40
    tokens = [long + each for each in letters[:1_000]]
    shared = module.Masks(automaton, [*tokens, b""], 1_001, (1_000,), WORK)
    shared.mask(states[0])
    both = lines_of(student, lambda: shared.mask(states[2]))
    if both > 20_000:
        promise = "Bytes with which several tokens begin are read once for all of them: at most 20,000 lines."
        seen = f"1,000 tokens begin with the same 40 digits, and a mask executed {both:,} lines."
        raise Broken("again", promise, seen)
    kept_masks(module, automaton, states)
    bounded_work(student)
    return f"a mask executed {lines:,} lines, and {again} the second time"


def number(most: int) -> Network:
    """Return the grammar of a number with many digits, each of which leads to another state."""
    digits = sequence(*[lambda net, start: _digit(net, start)] * most)
    return Network(digits)


def _digit(net: Network, start: int) -> int:
    end = net.node()
    net.read(start, 48, 57, end)
    return end


def kept_masks(module: Any, automaton: Any, states: Sequence[Any]) -> None:
    """Check that not all masks of many states are kept."""
    size = 2**17
    masks = module.Masks(automaton, [b"1", b"a"], size, (1,), WORK)
    masks.mask(states[0])
    one = size // 8
    tracemalloc.start()
    try:
        for state in states[1:]:
            masks.mask(state)
        kept = tracemalloc.get_traced_memory()[0] // one
    finally:
        tracemalloc.stop()
    limit = int(getattr(module, "KEPT_MASKS", 256))
    if kept > 2 * limit:
        promise = f"At most {limit} masks are kept for one grammar."
        seen = f"After the masks of {len(states):,} states, memory for {kept:,} masks is in use."
        raise Broken("grows", promise, seen)


def bounded_work(student: Student) -> None:
    """Check that a mask that reads too many places raises GrammarTooLargeError."""
    most = 5_000
    module = parts_of(student, max_work=most)
    tokens = [bytes([97 + i % 5, 97 + i // 5 % 5, 97 + i // 25 % 5, 97 + i // 125]) for i in range(600)]

    def body(net: Network, start: int) -> int:
        end = net.node()
        for _ in range(60):  # sixty ways to read the same letters
            at = start
            for _ in range(5):
                after = net.node()
                net.read(at, 97, 122, after)
                at = after
            net.skip(at, end)
        return end

    automaton = module.Automaton(Network(body))
    masks = module.Masks(automaton, [*tokens, b""], 601, (600,), most)
    try:
        lines = lines_of(student, lambda: masks.mask(automaton.start()))
    except GrammarTooLargeError:
        return
    if lines > 20 * most:
        promise = "A mask whose states have more than `max_work` places together raises GrammarTooLargeError."
        seen = f"With max_work={most:,}, a mask of 780 beginnings of tokens in 60 places executed {lines:,} lines."
        raise Broken("unbounded", promise, seen)


# ---- answers ------------------------------------------------------------------------------------------------


@retried
def make_answer(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random grammar and vocabulary, and two answers that go on token by token, with drafts."""
    workload = make_mask(rng, size)
    grammar = Grammar(workload["grammar"], workload["rules"])
    tokens, ends = [bytes(each) for each in workload["tokens"]], workload["ends"]
    events: list[list[Any]] = []
    texts = [b"", b""]

    def guess(text: bytes) -> int:
        tree = grammar.walk(text)
        texts = {t: text + more for t, more in enumerate(tokens) if more and t not in ends}
        good = [t for t, more in texts.items() if grammar.goes_on(grammar.walk(more))]
        good += ends if grammar.ends(tree) and rng.random() < 0.3 else []
        return rng.choice(good) if good and rng.random() < 0.9 else rng.randrange(len(tokens) + workload["more"])

    for _ in range(rng.randint(2, 6)):
        which = rng.randrange(2)
        run: list[int] = []
        text = texts[which]
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            run.append(guess(text))
            text += tokens[run[-1]] if run[-1] < len(tokens) else b""
        if rng.random() < 0.5:
            events.append(["masks", which, run])
        else:
            events.append(["advance", which, run])
            texts[which] = text
        events.append(["masks", rng.randrange(2), []])
    return {**workload, "texts": [], "events": events}


def show_answer(workload: dict[str, Any]) -> str:
    """Describe the grammar, the vocabulary and the calls."""
    calls = [f"answer {which}: {name}({tokens})" for name, which, tokens in workload["events"]]
    return "\n".join([show_mask({**workload, "texts": []}), *calls])


class Reading:
    """The text of an answer, as far as its tokens are allowed: None after an end token or a wrong one."""

    def __init__(self, world: World, text: bytes | None = b""):
        self.world, self.text = world, text

    def after(self, token: int) -> Reading:
        """Return the answer after one more token."""
        world, text = self.world, self.text
        if text is None or token in world.ends or token >= len(world.tokens) or not world.tokens[token]:
            return Reading(world, None)
        text += world.tokens[token]
        return Reading(world, text if world.grammar.goes_on(world.grammar.walk(text)) else None)

    def tokens(self) -> set[int]:
        """Return the tokens that may follow."""
        return set() if self.text is None else self.world.right(self.text)


def run_answers(student: Student, workload: dict[str, Any], ends: bool = True) -> None:
    """Compare the masks of two answers of one grammar, before and after drafts, with those by trying every token.

    Without ``ends``, a mask after an end token as a draft may also be that before it: two mistakes lead to this mask.
    """
    world = World(student, workload)
    matchers = [world.module.MyMatcher(world.masks) for _ in range(2)]
    answers = [Reading(world), Reading(world)]
    drafted = [Reading(world), Reading(world)]  # if drafts were never taken back
    first = [Reading(world), Reading(world)]  # if only the first token of a call were read
    last = [Reading(world), Reading(world)]  # if only the last one were
    played: list[list[tuple[str, list[int]]]] = [[], []]
    for name, which, tokens in workload["events"]:
        if which not in (0, 1) or not all(isinstance(t, int) and 0 <= t < world.size for t in tokens):
            raise Invalid
        given = list(tokens)
        played[which].append((name, list(tokens)))
        if name == "advance":
            matchers[which].advance(given)
            for token in tokens:
                answers[which], drafted[which] = answers[which].after(token), drafted[which].after(token)
            for token in tokens[:1]:
                first[which] = first[which].after(token)
            for token in tokens[-1:]:
                last[which] = last[which].after(token)
            continue
        found = matchers[which].masks(given)
        if given != tokens:
            raise Broken("changes", "`masks` does not change its arguments.", f"The drafts {tokens} are {given}.")
        check_rows(world, found, len(tokens))
        reading, other = answers[which], drafted[which]
        for i in range(len(tokens) + 1):
            got = unpacked(found[i], world.size, "A row")
            where = f"after {i} of the drafts {tokens}, " if i else ""
            also = [
                ("drafts-stay", other.tokens(), "the mask is that after the drafts of an earlier call."),
                ("several", first[which].tokens(), "the mask is that after the first token of each call of `advance`."),
                ("several", last[which].tokens(), "the mask is that after the last token of each call of `advance`."),
                ("other", answers[1 - which].tokens(), "the mask is that of another answer with the same grammar."),
                ("shared", set(range(world.size)), "the mask has the bits that the caller wrote into an earlier one."),
            ]
            if i and not ends and reading.text is None and got == answers[which].tokens():
                break
            if i:
                also = [("no-drafts", answers[which].tokens(), "the mask is that before the drafts.")]
            try:
                judge_row(world, reading, got, where, also)
            except Broken as fault:
                if fault.cause in ("several", "other", "drafts-stay"):
                    judge_alone(World(student, workload), reading, played[which], fault)
                raise
            if i < len(tokens):
                reading, other = reading.after(tokens[i]), other.after(tokens[i])
                if reading.text is None and tokens[i] not in world.ends:
                    break  # a mask after a draft that is not allowed has no effect
        for token in tokens:
            drafted[which] = drafted[which].after(token)
        found[:] = pack_mask(np.ones(world.size, bool))


def judge_alone(world: World, reading: Reading, played: Sequence[tuple[str, list[int]]], fault: Broken) -> None:
    """Repeat an answer alone: no other answers, no drafts, and one token in each call.

    If it fails here too, the cause is none of the three, and its own `Broken` is raised.
    For the cause ``drafts-stay``, raise `Broken` with ``several`` if the calls without drafts go wrong too, and with
    ``other`` if the calls of this answer alone go well.
    """
    matcher = world.module.MyMatcher(world.masks)
    for token in [token for name, tokens in played if name == "advance" for token in tokens]:
        matcher.advance([token])
    judge_row(world, reading, unpacked(matcher.masks([])[0], world.size, "A row"), "", ())
    if fault.cause == "drafts-stay":
        matcher = world.module.MyMatcher(world.masks)
        for name, tokens in played:
            if name == "advance":
                matcher.advance(list(tokens))
        if unpacked(matcher.masks([])[0], world.size, "A row") != reading.tokens():
            seen = "Without any drafts the mask is wrong too. It is right if each token comes in a call of its own."
            raise Broken("several", fault.promise, seen)
        matcher = world.module.MyMatcher(world.masks)
        for name, tokens in played[:-1]:
            getattr(matcher, name)(list(tokens))
        if unpacked(matcher.masks([])[0], world.size, "A row") == reading.tokens():
            raise Broken("other", fault.promise, "The mask is wrong only beside another answer with the same grammar.")


def check_rows(world: World, found: Any, drafts: int) -> None:
    """Raise `Broken` if the masks of an answer have not the right form."""
    shape = (1 + drafts, -(-world.size // 32))
    if not isinstance(found, np.ndarray) or found.dtype != np.int32 or found.shape != shape:
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else repr(type(found).__name__)
        promise = "`masks` returns int32 [1 + drafts, words]: a mask for the next token, and one after each draft."
        raise Broken("form", promise, f"It returned {got} for {drafts} drafts; expected int32 {list(shape)}.")


def judge_row(
    world: World, reading: Reading, got: set[int], where: str, also: Sequence[tuple[str, set[int], str]]
) -> None:
    """Compare one row of an answer's masks with the right one."""
    if got == reading.tokens():
        return
    if reading.text is None:
        seen = f"{where}token {min(got)} is allowed."
        for cause, tokens, words in also:
            if got == tokens and cause != "no-drafts":
                raise Broken(
                    cause,
                    "The masks are those of the answer so far.",
                    f"{(where + words)[0].upper()}{(where + words)[1:]}",
                )
        raise Broken("after-end", "After an end token, or a token that is not allowed, no token may follow.", seen)
    judge_mask(world, reading.text, got, also)


# ---- the vocabulary of tutor ----------------------------------------------------------------------------------

_TERM = {"term": {"enum": ["KV cache", "page"]}, "pages": {"type": "integer", "maximum": 99}}
_ITEM = {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}, {"type": "null"}]}
_NODE = {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}
SCHEMAS: tuple[tuple[Any, str], ...] = (
    ("regex", "[0-9]?[0-9]:[0-9][0-9]( [ap]m)?"),
    ("regex", "The [a-z ]+ (opens|closes) at (1?[0-9]|2[0-4])\\."),
    ("choice", '["page", "prefix", "prefill", "größe"]'),
    ("json_schema", json.dumps({"type": "object", "properties": _TERM, "required": ["term", "pages"]})),
    ("json_schema", json.dumps({"type": "array", "items": _ITEM, "maxItems": 3})),
    (
        "json_schema",
        json.dumps(
            {"$defs": {"n": {"type": "object", "properties": _NODE, "required": ["v", "next"]}}, "$ref": "#/$defs/n"}
        ),
    ),
)
"""(kind, text) of the grammars for the vocabulary of `tutor`."""


def run_schemas(student: Student) -> str:
    """Compare the masks along answers in the vocabulary of `tutor` with those by trying every token."""
    from minisgl.plugins.grammar.automaton import DEAD, START, Automaton
    from minisgl.plugins.grammar.base import bytes_to_read
    from minisgl.plugins.grammar.languages import network_of

    tokenizer, rng, compared = tutor_tokenizer(), student.random, 0
    tokens = bytes_to_read(tokenizer, tokenizer.vocab_size)
    ends = sorted(tokenizer.eos_ids)
    made = student.make(student.config(), tokenizer=tokenizer)
    promise = "In the vocabulary of tutor, a mask allows the tokens with whose bytes a text of the grammar goes on."
    for kind, text in SCHEMAS:
        asked = Asked(kind, text)
        made.check(asked)
        matcher = made.constraint(asked, len(tokens), ends)
        automaton, state, said = Automaton(network_of(asked)), START, b""
        for _ in range(8):
            right = {t for t, more in enumerate(tokens) if more and automaton.walk(state, more) != DEAD} - set(ends)
            right |= set(ends) if automaton.is_final(state) else set()
            got = unpacked(matcher.masks([])[0], len(tokens), "The mask")
            compared += 1
            if got != right:
                token = min(got ^ right)
                is_ = "allowed" if token in got else "forbidden"
                name = "an end token" if token in ends else text_of(tokens[token])
                seen = f"{kind} {text[:60]}: after {text_of(said)}, token {token}, {name}, is {is_}."
                raise Broken("wrong", promise, seen)
            token = rng.choice(sorted(right))
            if token in ends:
                break
            matcher.advance([token])
            state, said = automaton.walk(state, tokens[token]), said + tokens[token]
    dead_end(made)
    return f"{compared} masks of {len(tokens):,} tokens"


def dead_end(made: Any) -> None:
    """Check that a schema that only calls itself is refused."""
    from minisgl.core import InvalidRequestError

    endless = '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
    try:
        made.check(Asked("json_schema", endless))
    except InvalidRequestError:
        return
    promise = "A grammar without any text is refused."
    raise Broken("dead-end", promise, "A schema of an object that must contain such an object again was accepted.")


# ---- the engine and the server --------------------------------------------------------------------------------


def run_engine(student: Student) -> str:
    """Compare `tutor`'s answers with the student's masks with those of `grammar=plain`, greedy and sampled."""
    mine = ["num_pages=128", f"plugins={student.path}", *student.lab.words]
    count = 0
    for i, (kind, text) in enumerate(SCHEMAS[:5]):
        params = SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i, grammar=Asked(kind, text))
        (right,) = generate(["num_pages=128", "grammar=plain"], _PROMPTS, params, 1)
        (got,) = student.run(generate, mine, _PROMPTS, params, 1)
        for prompt, answer, expected in zip(_PROMPTS, got, right, strict=True):
            count += 1
            if answer != expected:
                at = next((k for k, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b), len(answer))
                seen = f"Token {at} of the answer to {prompt!r} with the {kind} {text[:40]} differs."
                raise Broken("promise", "The answers are those of grammar=plain.", seen)
    return f"{count} answers equal those with grammar=plain"


_PROMPTS = ("What is 123 + 456?", "What is a radix cache?")


def run_server(served: Served) -> str:
    """Ask for structured answers over HTTP, and check their form and the calls of the plugin."""
    client = served.client()
    for text in ("[0-9]{3} pages", "(yes|no)\\."):
        answer = client.chat.completions.create(
            model="tutor", messages=[{"role": "user", "content": "What is a page?"}], max_tokens=30, temperature=0,
            extra_body={"regex": text},
        ).choices[0].message.content or ""  # fmt: skip
        if not re.fullmatch(text, answer):
            promise = "An answer has the form that the client asked for."
            raise Broken("wrong", promise, f"The client asked for {text}; the answer is {answer[:60]!r}.")
    check_idle(served)
    counted = check_called(served, ["constraint"], "scheduler-0")
    return f"scheduler-0 called constraint {int(counted['constraint'])}×"


# ---- the number to beat ---------------------------------------------------------------------------------------

DRAFT_COST = 0.1
"""What a draft costs, in steps."""
MOST_COST, TIMES = 0.35, "times the steps without drafts"
"""The number to beat. Tokens of masks with one token reach 0.6, the longest tokens of a text that must follow 0.39."""
ANSWERS = 48
"""Answers of a run: with a third of them, the same file reaches 0.35 or 0.38 by its seed."""


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Count the steps of answers that no file knows, if the tokens that `forced` returns are drafts."""
    tokenizer = tutor_tokenizer()
    made = student.make(student.config(), tokenizer=tokenizer)
    alone = steps = drafts = 0
    for kind, grammar, text in unseen_answers(student.random, ANSWERS):
        tokens = [*tokenizer.encode(text), min(tokenizer.eos_ids)]
        matcher = made.constraint(Asked(kind, grammar), tokenizer.vocab_size, sorted(tokenizer.eos_ids))
        at = 0
        while at < len(tokens):
            forced = list(matcher.forced(8))[:8]
            drafts, steps = drafts + len(forced), steps + 1
            good = next((i for i, (a, b) in enumerate(zip(forced, tokens[at:], strict=False)) if a != b), len(forced))
            good = min(good, len(tokens) - at - 1)
            matcher.advance(tokens[at : at + good + 1])
            at += good + 1
        alone += len(tokens)
    times = (steps + DRAFT_COST * drafts) / alone
    counted = f"{times:.2f} {TIMES}: {alone} tokens, {steps} steps, {drafts} drafts"
    return counted, round(times, 2) <= MOST_COST


def try_states(student: Student) -> str:
    """Search for a wrong state, and then try a rule that begins with itself."""
    note = search(make_states, run_states, tries=200, at_least=len(CORNERS), show=show_states)(student)
    if student.replay is None:
        left_recursion(student)
    return note


def try_masks(student: Student) -> str:
    """Search for a wrong mask, and then count the work."""
    note = search(make_mask, run_masks, tries=150, at_least=len(CORNERS), show=show_mask)(student)
    return note if student.replay is not None else f"{note}; {mask_work(student)}"


def try_answers(student: Student) -> str:
    """Search for a wrong mask of an answer: first without the masks after an end token as a draft."""
    note = search(make_answer, partial(run_answers, ends=False), tries=160, show=show_answer)(student)
    search(make_answer, run_answers, tries=40, show=show_answer)(student)
    return note


GATES = (
    Gate("states", "a state has exactly the places that a text can have reached", try_states, part="grammar.states"),
    Gate("mask", "a mask allows what trying every token allows", try_masks, part="grammar.mask", needs=("states",)),
    Gate(
        "answer",
        "answers go on, and drafts are guesses",
        try_answers,
        part="grammar.answer",
        needs=("states", "mask"),
    ),
    Gate("schemas", "masks of tutor's vocabulary equal those by trying every token", run_schemas, limit=30.0),
    Gate("engine", "tutor's structured answers are those of grammar=plain", run_engine, limit=90.0, transcript=True),
    Gate("server", "the real server gives answers of the asked form", run_server, served=True),
)
STRETCH = Stretch(
    "Some texts leave no choice, and a matcher may return their tokens as drafts: `forced(count)`. The skeleton has "
    f"none, and the number 1.00. A draft costs as much as a tenth of a step. Reach {MOST_COST:.2f} times the steps "
    "without drafts. The grammars and the answers are new in each run.",
    measure_stretch,
)
