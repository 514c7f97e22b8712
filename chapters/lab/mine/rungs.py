"""The ladder of a student's own engine: exact counts on the course's workload, before and after each finished lab.

``python -m minisgl.chapters.lab.mine.rungs`` reads a JSON list of rungs from its standard input, and writes a JSON line
for each: so the student's code runs in a process of its own. The engine computes nothing and samples recorded tokens,
so the counts are equal on every machine. Only labs that change the scheduler's decisions have a rung.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.chapters.lab.child import ChildError, ask_child
from minisgl.chapters.lab.mine.engine import WINDOW_LAB, OwnPart, parts_of
from minisgl.config import ConfigError

__all__ = ["COUNTS", "Rung", "changes", "is_counted", "measure", "rungs_of"]

PLAIN = ("stage=4",)
"""The options of the first rung: the engine of the ladder's stage 4, with pages and without any idea of a lab."""
CHUNK = "max_prefill_tokens=128"
"""The limit of prompt tokens of a step, from the first own policy on: that of the ladder's stages 6 to 9."""
COUNTED_HOOKS = ("scheduler", "cache", "speculation")
COUNTS = {
    "computed": "tokens computed",
    "prefilled": "prefilled tokens",
    "steps": "steps",
    "worst_gap": "worst gap",
    "worst_wait": "worst wait",
}
"""Field of `minisgl.chapters.ladder.stages.Stage` → its name in tables."""


@dataclass(frozen=True)
class Rung:
    """One row: the lab that was finished last (empty: the plain engine), and the options of the engine."""

    lab: str
    words: list[str]
    python_path: list[str]


def is_counted(part: OwnPart) -> bool:
    """Return whether a lab's part changes the scheduler's decisions, so that the ladder counts it.

    The model of the ladder has no windows, so a cache for windows changes nothing there.
    """
    return part.lab.hook in COUNTED_HOOKS and part.lab.lab != WINDOW_LAB


def rungs_of(parts: Sequence[OwnPart]) -> list[Rung]:
    """Return the plain engine, and then the engine with the own parts up to each finished lab that is counted."""
    counted = [part for part in parts if part.finished and is_counted(part)]
    found = [Rung("", list(PLAIN), [])]
    for number, part in enumerate(counted, 1):
        engine = parts_of(counted[:number])
        chunk = [CHUNK] if any(word.startswith("scheduler=") for word in engine.words) else []
        found.append(Rung(part.lab.lab, [*PLAIN, *engine.words, *chunk], engine.python_path))
    return found


def measure(rungs: Sequence[Rung], seconds: float = 300.0) -> Iterator[dict[str, Any]]:
    """Yield the counts of each rung: ``lab``, and the keys of `COUNTS`, or ``error``.

    Each rung is counted in a child process, which is killed after ``seconds``.
    """
    for rung in rungs:
        path = os.pathsep.join([*rung.python_path, os.environ.get("PYTHONPATH", "")])
        try:
            counts = ask_child("minisgl.chapters.lab.mine.rungs", {"words": rung.words}, seconds, {"PYTHONPATH": path})
        except ChildError as error:
            counts = {"error": str(error)}
        yield {"lab": rung.lab, **counts}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the counts that differ between two rungs, in words: ``worst gap 5,196 → 128``."""
    if "error" in before or "error" in after:
        return []
    pairs = ((name, before[key], after[key]) for key, name in COUNTS.items())
    return [f"{name} {a:,} → {b:,}" for name, a, b in pairs if a != b]


def count(words: Sequence[str]) -> dict[str, int]:
    """Serve the course's workload with the options ``words``, and return the counts."""
    from minisgl.chapters.ladder.recorded import RecordedEngine, outputs
    from minisgl.chapters.ladder.stages import serve
    from minisgl.chapters.ladder.workload import workload
    from minisgl.core import EngineSpec
    from minisgl.options.compose import compose
    from minisgl.plugin_manager.manager import PluginManager

    manager, arrivals = PluginManager.load(light=True), workload()
    config = compose(manager, list(words))
    assert config.num_pages is not None and config.max_seq_len is not None
    spec = EngineSpec(config.page_size, config.num_pages, config.max_running_requests, config.max_seq_len, 2048)
    stage, _ = serve(config, manager, RecordedEngine(spec, arrivals, outputs()), arrivals, 4)
    return {key: int(getattr(stage, key)) for key in COUNTS}


def main() -> None:
    """Answer one request of `measure`."""
    request = json.loads(sys.stdin.read())
    channel, sys.stdout = sys.stdout, sys.stderr  # a student's print() does not go between the counts
    try:
        counted = count(request["words"])
    except ConfigError as error:
        sys.exit(str(error))
    print(json.dumps(counted), file=channel, flush=True)


if __name__ == "__main__":
    main()
