"""A match: all entries play the same hidden traces, and the result is a table and a picture.

The score of an entry on a trace is its count, divided by that of the reference, a shipped plugin: lower is better. The
score of the match is the geometric mean over the traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minisgl.chapters.lab.arena.play import BASELINES, Played
from minisgl.chapters.lab.child import ChildError, ask_child
from minisgl.config import ConfigError
from minisgl.testing.serving import scaled_timeout
from minisgl.trace.draw.svg import Picture

__all__ = ["Entry", "draw_match", "match", "table"]

REFERENCE = {"policy": "mixed", "cache": "radix"}
"""What plays → the baseline whose score is 1."""
SCORED = {
    "policy": ("wait_per_token", "wait per token: from a request's arrival to its end, by the tokens of its answer"),
    "cache": ("computed", "prompt tokens that were computed, because the cache did not have them"),
}
"""What plays → the field of `Played` that is scored, and its meaning."""
SECONDS = 120.0
"""Seconds that one entry may take for all traces, on a machine with an idle core."""


@dataclass
class Entry:
    """One entry of a match. ``out`` says why it is out; its scores are then empty."""

    name: str
    own: bool
    played: list[Played] = field(default_factory=list)
    out: str = ""
    scores: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """The geometric mean of the scores; infinite for an entry that is out."""
        return math.exp(sum(map(math.log, self.scores)) / len(self.scores)) if self.scores else math.inf


def match(kind: str, files: Sequence[str], seed: int) -> Iterator[Entry]:
    """Play the baselines and ``files``, one after another, and yield each entry when it has played.

    Raise `ConfigError` if the reference can't play: without it, there is no scale.
    """
    entries = [(name, False) for name in BASELINES[kind]] + [(file, True) for file in files]
    reference: list[Played] = []
    for name, own in sorted(entries, key=lambda entry: entry[0] != REFERENCE[kind]):
        entry = _played(kind, name, own, seed)
        if not reference:
            if not entry.played:
                raise ConfigError(f"arena: the shipped {entry.name} could not play, so there is no scale: {entry.out}. "
                                  "Is the machine too busy?")  # fmt: skip
            reference = entry.played
        scored = SCORED[kind][0]
        pairs = zip(entry.played, reference, strict=True) if entry.played else ()
        entry.scores = [max(getattr(mine, scored), 1e-9) / getattr(other, scored) for mine, other in pairs]
        yield entry


def _played(kind: str, name: str, own: bool, seed: int) -> Entry:
    entry = Entry(Path(name).name if own else name, own)
    request = {"kind": kind, "entry": name, "file": own, "seed": seed}
    try:
        found = ask_child("minisgl.chapters.lab.arena.play", request, scaled_timeout(SECONDS))
    except ChildError as error:
        entry.out = str(error)
        return entry
    entry.out = found.get("out", "")
    entry.played = [Played(**each) for each in found.get("played", ())]
    return entry


def table(kind: str, entries: Sequence[Entry]) -> str:
    """Return the result as text: the entries by score, and what was counted over all traces."""
    names = [each.trace for each in next(entry.played for entry in entries if entry.played)]
    head = f"{'':<24}{'score':>7}" + "".join(f"{name:>11}" for name in names)
    head += f"{'TTFT p99':>10}{'worst gap':>11}{'steps':>8}{'computed':>10}{'retracted':>11}"
    lines = [head]
    for entry in sorted(entries, key=lambda entry: entry.score):
        name = ("* " if entry.own else "  ") + entry.name
        if entry.out:
            lines.append(f"{name:<24}{'out':>7}  {entry.out}")
            continue
        scores = "".join(f"{score:>11.3f}" for score in entry.scores)
        played = entry.played
        lines.append(
            f"{name:<24}{entry.score:>7.3f}{scores}{1000 * max(p.ttft_p99 for p in played):>7.0f} ms"
            f"{1000 * max(p.worst_gap for p in played):>8.0f} ms{sum(p.steps for p in played):>8,}"
            f"{sum(p.computed for p in played):>10,}{sum(p.retractions for p in played):>11,}"
        )
    return "\n".join(lines)


LEFT, COLUMN, BAR, ROW, TOP = 190, 132, 74, 28, 3.0
"""Pixels: of the names, a column, the bar of the score 1, and a line. `TOP`: the score at which a bar is cut."""


def draw_match(kind: str, entries: Sequence[Entry], seed: int) -> str:
    """Return the result as SVG: a line for each entry, a column of bars for each trace, and one for the match."""
    pic = Picture("arena", f"Arena: {kind}, seed {seed}")
    order = sorted(entries, key=lambda entry: entry.score)
    names = ["match", *(each.trace for each in next(entry.played for entry in order if entry.played))]
    said = "; ".join(f"{e.name} {e.score:.3f}" if e.scores else f"{e.name} is out: {e.out}" for e in order)
    pic.desc = f"Scores, lower is better: {said}."
    pic.text(0, 14, f"{kind}, hidden traces of seed {seed}", "strong")
    pic.text(0, 32, f"{SCORED[kind][1]}; relative to {REFERENCE[kind]}, shorter is better", "soft")
    y = pic.legend(0, 54, [("cache", "an entry"), ("even", "a shipped plugin"), ("price", "cut at 3")]) + 12.0
    for column, name in enumerate(names):
        pic.text(LEFT + column * COLUMN, y, name, "strong")
    y += 10
    for entry in order:
        pic.path([(0, y), (LEFT + len(names) * COLUMN - 20, y)], "line")
        pic.text(0, y + 19, entry.name[:26], "strong" if entry.own else "")
        if entry.out:
            pic.text(LEFT, y + 19, f"out: {entry.out}"[:110], "soft")
        for column, score in enumerate([entry.score, *entry.scores] if entry.scores else []):
            x, wide = LEFT + column * COLUMN, BAR * min(score, TOP) / TOP
            kind_of_bar = "price" if score > TOP else "cache" if entry.own else "even"
            pic.rect(x, y + 8, max(wide, 1.5), 13, kind_of_bar, tip=f"{entry.name}, {names[column]}: {score:.3f}")
            pic.text(x + wide + 5, y + 19, f"{score:.2f}", "strong" if entry.own else "soft")
        y += ROW
    return pic.render()
