# ruff: noqa: E501 (phrasings)
"""Exercises with one right answer (counting, copying, sorting, sums), and games of chance with fixed odds.

Each function returns a request and its answer. Whether an exercise is held out depends on its content (the pair of
summands in either order, the range to count, the text to copy, the set to sort), never on the phrasing of the request.
"""

from __future__ import annotations

import random

from minisgl.chapters.tutor.offscript import off_script
from minisgl.chapters.tutor.words import NUMBER_WORDS, Split, any_word, chance, draw, held_out, invent

COLOR_ODDS = {"red": 50, "blue": 30, "green": 20}
"""Probability of each color as an answer, in percent. With top-p 0.7 the first two remain."""

COUNT_ASKS = (
    "Count from {a} to {b}.", "Count from {a} to {b}.", "Count from {a} up to {b}.", "Count {a} to {b}.",
    "List the numbers from {a} to {b}.", "Say the numbers from {a} to {b}.", "Give me all numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}.", "Start at {a} and count to {b}.", "Numbers from {a} to {b}",
)  # fmt: skip
COUNT_STEP_ASKS = (
    "Count from {a} to {b} by {s}.", "Count from {a} to {b} in steps of {s}.", "Count by {s} from {a} to {b}.",
    "Count from {a} to {b} with step {s}.",
)  # fmt: skip
COPY_ASKS = (
    "Repeat: {t}", "Repeat after me: {t}", "Copy: {t}", "Copy this: {t}", "Copy this text: {t}", "Say: {t}", "Echo: {t}",
    "Repeat this: {t}", "Write this again: {t}", "Say this again: {t}", "Copy the following: {t}", "Echo {t}",
    "Repeat exactly: {t}", "Repeat the words: {t}", "Repeat {t}", "Copy this line.\n{t}", "Repeat: \"{t}\"", "Say \"{t}\".",
)  # fmt: skip
SORT_ASKS = (
    "Sort: {t}", "Sort these numbers: {t}", "Sort {t}.", "Put these numbers in order: {t}", "Order these numbers: {t}",
    "Sort the numbers {t}.", "Sort from smallest to largest: {t}", "Please sort this list: {t}",
)  # fmt: skip
SORT_DOWN_ASKS = ("Sort from largest to smallest: {t}", "Sort in descending order: {t}", "Sort downwards: {t}")
SORT_WORD_ASKS = ("Sort these words: {t}", "Put these words in order: {t}", "Sort alphabetically: {t}", "Sort: {t}")
SUM_ASKS = (
    "What is {a} + {b}?", "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a}+{b}=?", "Add {a} and {b}.",
    "What is {a} plus {b}?", "How much is {a} + {b}?", "How much is {a} plus {b}?", "Compute {a} + {b}.", "{a} plus {b}",
    "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "Sum of {a} and {b}?", "What do you get for {a} + {b}?",
    "Can you add {a} and {b}?", "Tell me {a} + {b}.", "What does {a} + {b} make?", "What's {a}+{b}?", "Solve {a} + {b}.",
)  # fmt: skip
DICE_ASKS = (
    "Roll a die.", "Roll a dice.", "Throw a die.", "Roll the dice.", "Pick a number from 1 to 6.", "Roll a six-sided die.",
    "Throw the dice.", "Give me a dice roll.", "Choose a number between 1 and 6.", "Roll.", "Roll again.", "Roll the die.",
)  # fmt: skip
COLOR_ASKS = (
    "Name a color.", "Pick a color.", "Choose a color.", "Say a color.", "Give me a color.", "Name a colour.",
    "Pick a colour.", "Which color do you choose?", "Tell me a color.", "Any color, please.", "Choose a colour.",
)  # fmt: skip
COIN_ASKS = ("Flip a coin.", "Toss a coin.", "Heads or tails?", "Throw a coin.")

Exercise = tuple[str, str]


def count(rng: random.Random, split: Split, longest: int = 40) -> Exercise:
    """Ask to count from a to b, up or down, at times in steps. The triple (a, b, step) decides the split."""
    stepped = chance(rng, 15)

    def make() -> tuple[int, int, int]:
        step = rng.choice((2, 2, 3, 5, 10)) if stepped else 1
        low = rng.randint(0, rng.choice((1, 9, 20, 99, 99, 300, 900)))
        high = low + step * rng.randint(1, longest if chance(rng, 40) else 12)
        return (high, low, step) if chance(rng, 25) else (low, high, step)

    start, stop, step = draw(split, make, lambda item: "count {} {} {}".format(*item))
    down = stop < start
    numbers = range(start, stop - 1, -step) if down else range(start, stop + 1, step)
    a, b = (_number(rng, start), _number(rng, stop)) if chance(rng, 8) else (str(start), str(stop))
    if stepped:
        request = rng.choice(COUNT_STEP_ASKS).format(a=a, b=b, s=step)
    elif start == 1 and not down and chance(rng, 40):
        request = rng.choice(("Count to {b}.", "Count up to {b}.", "Can you count to {b}?")).format(b=b)
    elif down and chance(rng, 70):
        request = rng.choice(("Count down from {a} to {b}.", "Count backwards from {a} to {b}.")).format(a=a, b=b)
    else:
        request = rng.choice(COUNT_ASKS).format(a=a, b=b)
    return request, ", ".join(map(str, numbers))


def copy(rng: random.Random, split: Split, longest: int = 24) -> Exercise:
    """Ask to repeat a sentence, or a line of words, invented words and numbers."""
    if chance(rng, 15):
        text = off_script(rng, split)[0]
        return rng.choice(COPY_ASKS).format(t=text), text
    unit = rng.choice((_number_unit, _mixed_unit, any_word, any_word, invent, _capital_unit))
    glue = rng.choice((" ", " ", " ", ", ", " - "))

    def make() -> str:
        size = rng.randint(1, longest if chance(rng, 30) else 8)
        text = glue.join(unit(rng) for _ in range(size))
        return f"{text[:1].upper()}{text[1:]}{rng.choice('..!?')}" if chance(rng, 15) else text

    text = draw(split, make)
    return rng.choice(COPY_ASKS).format(t=text), text


def sort(rng: random.Random, split: Split) -> Exercise:
    """Ask to sort numbers in ascending or descending order, or words alphabetically."""
    if chance(rng, 20):
        words = draw(
            split, lambda: [any_word(rng) for _ in range(rng.randint(2, 5))], lambda item: " ".join(sorted(item))
        )
        return rng.choice(SORT_WORD_ASKS).format(t=", ".join(words)), ", ".join(sorted(words))

    def make() -> list[int]:
        top = rng.choice((9, 20, 99, 99, 99, 999))
        return [rng.randint(0, top) for _ in range(rng.randint(2, 9 if chance(rng, 40) else 5))]

    numbers = draw(split, make, lambda item: " ".join(map(str, sorted(item))))
    down = chance(rng, 20)
    text = rng.choice((", ", ", ", " ")).join(map(str, numbers))
    return rng.choice(SORT_DOWN_ASKS if down else SORT_ASKS).format(t=text), ", ".join(
        map(str, sorted(numbers, reverse=down))
    )


def sum_held_out(a: int, b: int) -> bool:
    """Return whether a + b and b + a are held out from training."""
    return held_out(f"sum {min(a, b)} {max(a, b)}")


def add(rng: random.Random, split: Split) -> Exercise:
    """Ask for the sum of two numbers below 1,000. Training text contains a held-out pair in neither order."""

    def make() -> tuple[int, int]:
        limits = rng.choice(
            ((9, 9), (20, 20), (99, 99), (99, 99), (99, 99), (999, 99), (99, 999), (999, 999), (999, 9))
        )
        return rng.randint(0, limits[0]), rng.randint(0, limits[1])

    a, b = draw(split, make, lambda pair: f"sum {min(pair)} {max(pair)}")
    words = max(a, b) <= 20 and chance(rng, 15)
    text = rng.choice(SUM_ASKS).format(a=_number(rng, a) if words else a, b=_number(rng, b) if words else b)
    return text, f"{a} + {b} = {a + b}."


def play(rng: random.Random) -> Exercise:
    """Ask for a die (uniform), a color (50 / 30 / 20 percent) or a coin (uniform). The answer has these odds."""
    game = rng.randrange(10)
    if game < 5:
        return rng.choice(DICE_ASKS), str(rng.randint(1, 6))
    if game < 9:
        return rng.choice(COLOR_ASKS), rng.choices(list(COLOR_ODDS), list(COLOR_ODDS.values()))[0]
    return rng.choice(COIN_ASKS), rng.choice(("heads", "tails"))


def _number(rng: random.Random, value: int) -> str:
    return NUMBER_WORDS[value] if value <= 20 and chance(rng, 80) else str(value)


def _number_unit(rng: random.Random) -> str:
    return str(rng.randint(0, rng.choice((9, 99, 9999))))


def _mixed_unit(rng: random.Random) -> str:
    return _number_unit(rng) if chance(rng, 40) else any_word(rng)


def _capital_unit(rng: random.Random) -> str:
    word = any_word(rng)
    return rng.choice((word, word.capitalize(), word.upper()))
