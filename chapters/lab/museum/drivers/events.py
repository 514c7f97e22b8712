"""An observer that measures how long requests wait. A call is an event of `timing_histories`, and may call more hooks.

After each event, the timing of an ended request must be right, and an idle observer must keep nothing but ``ended``.
The trace has a line for each event, with the number of elements in each container of the observer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minisgl.chapters.lab.gates.meter import judge
from minisgl.chapters.lab.grader.gate import Broken, amount
from minisgl.chapters.lab.grader.held import container_sizes
from minisgl.chapters.lab.grader.observers import observer
from minisgl.chapters.lab.grader.timing_histories import REASONS, Stage, make_history
from minisgl.chapters.lab.museum.calls import Note

SYMPTOM = "All times on the dashboard are right. The memory of the server grows from day to day."


@dataclass
class Watched:
    """An observer, the events that it was told, and the sizes of its containers before the first one."""

    meter: Any
    stage: Stage
    before: dict[str, int]


def load(file: Path) -> Path:
    """Return the file: each workload gets a new observer."""
    return file


def start(file: Path, workload: Mapping[str, Any]) -> Watched:
    """Make a new observer."""
    student: Any = SimpleNamespace(path=file)
    meter, manager = observer(student, "ended")
    return Watched(meter, Stage(manager), _sizes(meter))


def _sizes(meter: Any) -> dict[str, int]:
    return {name: size for name, size in container_sizes(meter).items() if not name.startswith("ended")}


def call(watched: Watched, event: Any, note: Note) -> dict[str, int]:
    """Tell the observer one event."""
    stage, meter = watched.stage, watched.meter
    known = len(stage.ended)
    stage.apply(event)
    kind, _, *args = event
    uids = [uid for uid, _ in args[0]] if kind == "step" else args[:1]
    grown = {name: size - watched.before.get(name, 0) for name, size in _sizes(meter).items()}
    grown = {name: size for name, size in grown.items() if size or name in vars(meter)}
    more = {"reason": REASONS[args[1]]} if kind == "finish" else {}
    note(event=kind, requests=uids, **more, open=sorted(stage.open), ended=len(meter.ended), kept=grown)
    if len(meter.ended) != len(stage.ended):
        seen = f"{amount(len(stage.ended), 'request')} ended, and `ended` has {amount(len(meter.ended), 'timing')}."
        raise Broken("lost", "Every request that ends has one timing in `ended`.", seen)
    for uid, record in stage.ended[known:]:
        timing = meter.ended[-1]
        judge(uid, record, timing.ttft, list(timing.gaps))
    if not stage.open and (left := sum(grown.values())) > 0:
        seen = f"No request is open, and the observer keeps {amount(left, 'element')} more than at first."
        raise Broken("keeps", "An observer keeps nothing of an ended request but its timing.", seen)
    return {}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return random events, after which all requests have ended."""
    events, running = make_history(rng, 12 + number)["events"], list[int]()
    for kind, _, *args in events:
        if kind == "add":
            running.append(args[0])
        elif kind == "finish":
            running.remove(args[0])
    return {"calls": [*events, *(["finish", 1, uid, rng.randrange(len(REASONS))] for uid in running)]}
