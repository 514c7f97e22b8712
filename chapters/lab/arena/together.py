"""The work of a student's policy and cache together, on traces that no file knows: the number to beat of `capstone`.

Many requests with common handbooks wait at once, and the pool holds few handbooks. Whether a prefix is found then
depends on both parts: on what the cache keeps, and on the order in which the policy admits requests. Where no own part
is finished, the shipped one plays.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.arena.play import PAGE, build, play
from minisgl.chapters.lab.arena.traces import Ask, Trace
from minisgl.chapters.lab.mine.engine import WINDOW_LAB, OwnPart, module_of
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.drive import make_plugin

__all__ = ["STEP_TOKENS", "Together", "together"]

STEP_TOKENS = 183
"""Prompt tokens that cost as much as reading the weights once: 7.2 ms of 39.3 µs each, as in the chapters' costs."""
TRACES = 3
KINDS = {"scheduler": "policy", "cache": "cache"}
"""Group of plugins → the kind of entry of the arena."""
OWN = ("eviction",)
"""Options that have the value ``own``. ``pacing`` and ``sharing`` make steps smaller, and so more."""


@dataclass(frozen=True)
class Together:
    """Work in prompt tokens, relative to the shipped parts; its two counts; and the files whose parts played."""

    times: float
    computed: int
    steps: int
    files: list[str]


def rush(rng: random.Random) -> Trace:
    """Return 100 questions about ten handbooks, about 60 a second, and 8 long prompts, in a pool of 200 pages."""
    now, asks = 0.0, []
    for uid in range(1, 101):
        now += rng.expovariate(60.0)
        asks.append(Ask(uid, now, rng.randrange(10), 384, rng.randint(8, 80), rng.randint(8, 40)))
    asks += [
        Ask(uid, rng.uniform(0.0, now), 0, 0, rng.randint(600, 1200), rng.randint(8, 24)) for uid in range(501, 509)
    ]
    return Trace("rush", "100 questions about 10 handbooks at once", sorted(asks, key=lambda a: a.at), 200, 16)


def own_makers(package: Path, parts: Sequence[OwnPart]) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return the own policy and the own cache: group → the file's name, and a function that builds the part.

    The plugin of the package comes before that of a lab, and that of a later lab before that of an earlier one.
    """
    found: dict[str, tuple[str, Callable[[], Any]]] = {}
    for part in parts:
        group = part.lab.hook
        if part.finished and group in KINDS and part.lab.lab != WINDOW_LAB:
            found[group] = part.path.name, build(KINDS[group], str(part.path), True, OWN)
    module, source = module_of(package)
    sys.path.insert(0, source)
    plugin = PluginManager().add(module)
    for group in {each for each, _, _ in plugin.options} & set(KINDS):
        found[group] = package.name, build(KINDS[group], module, True, OWN)
    return found


def together(package: Path, parts: Sequence[OwnPart], rng: random.Random) -> Together:
    """Serve new traces with the own parts and with the shipped ones. Raise AssertionError if a promise is broken."""
    own = own_makers(package, parts)
    shipped: dict[str, Callable[[], Any]] = {
        "scheduler": lambda: make_plugin("scheduler", "mixed"),
        "cache": lambda: make_plugin("cache", "radix", page_size=PAGE, compare="numpy"),
    }
    mine = shipped | {group: make for group, (_, make) in own.items()}
    counts = []
    traces = [rush(rng) for _ in range(TRACES)]
    for makers in (mine, shipped):
        played = [play(trace, makers["scheduler"](), makers["cache"]()) for trace in traces]
        counts.append((sum(each.computed for each in played), sum(each.steps for each in played)))
    (computed, steps), (computed_shipped, steps_shipped) = counts
    times = (computed + STEP_TOKENS * steps) / (computed_shipped + STEP_TOKENS * steps_shipped)
    return Together(times, computed, steps, sorted(name for name, _ in own.values()))
