"""Random schedules through a student's own scheduler, with a check of the promises.

``python -m minisgl.chapters.lab.mine.schedules`` reads a JSON request from its standard input, and writes JSON lines:
the number of schedules that are done, and the failure that ended the run. The real scheduler, with the student's
policy, cache, proposer and observers, serves random requests on the simulated engine, which checks every step. Where a
lab is open, the shipped part runs.
"""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minisgl.chapters.lab.child import end_family
from minisgl.chapters.lab.mine.engine import OwnPart, parts_of
from minisgl.testing.serving import scaled_timeout

if TYPE_CHECKING:
    from minisgl.testing.drive import Report

__all__ = ["CHECKED", "Held", "run_schedules"]

CHECKED = {
    1: "every request ends with exactly one final reply",
    2: "a bad request is refused before it is queued",
    3: "every page and every row has one owner",
    4: "a page table never points to a page that was retired or freed",
    8: "an answer does not depend on other requests",
    9: "the pool is whole when idle",
}
"""The promises of docs/architecture.md that a schedule on the simulated engine checks."""
HOOKS = ("scheduler", "cache", "speculation", "observer")
"""The kinds of parts that take part in a schedule."""
FIRST = 10
"""Schedules after which the duration of the others is estimated."""
SILENT_SECONDS = 60.0
"""Seconds after which a schedule that is not done counts as hanging, on a machine with an idle core."""


@dataclass(frozen=True)
class Held:
    """The outcome of `run_schedules`: how many schedules ran without a failure, and the first failure, if any."""

    runs: int
    seed: int
    seconds: float
    failed: int | None = None
    text: str = ""

    @property
    def held(self) -> bool:
        """Whether all promises held in every schedule."""
        return self.failed is None


def run_schedules(
    parts: Sequence[OwnPart], runs: int, seed: int, *, only: int | None = None, say: Callable[[str], None] = print
) -> Held:
    """Run the schedules 1 to ``runs``, or the schedule ``only``, in a child process. ``say`` is told the progress.

    A schedule depends only on the seed and on its number.
    """
    taking = [part for part in parts if part.finished and part.lab.hook in HOOKS]
    engine = parts_of(taking)
    numbers = [only] if only is not None else list(range(1, runs + 1))
    words = [word for word in engine.words if not word.startswith("plugins=")]
    request = {"files": [str(part.path) for part in engine.used], "words": words, "numbers": numbers, "seed": seed}
    command = [sys.executable, "-m", "minisgl.chapters.lab.mine.schedules"]
    started, done, estimated = time.monotonic(), 0, False
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ), start_new_session=True
    ) as p:
        try:
            assert p.stdin is not None and p.stdout is not None
            p.stdin.write(json.dumps(request))
            p.stdin.close()
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=_read, args=(p.stdout, lines), daemon=True).start()
            begun, reported = 0.0, started
            while True:
                try:
                    line = lines.get(timeout=scaled_timeout(SILENT_SECONDS))
                except queue.Empty:
                    text = f"It was not done after {scaled_timeout(SILENT_SECONDS):.0f} s, and its process was ended."
                    return Held(done, seed, time.monotonic() - started, numbers[done], text)
                if not line:
                    text = "The process that runs the schedules has ended."
                    return Held(done, seed, time.monotonic() - started, numbers[done], text)
                message = json.loads(line)
                if "failed" in message:
                    return Held(done, seed, time.monotonic() - started, message["failed"], message["text"])
                done = message["done"]
                now = time.monotonic()
                if done == len(numbers):  # the end of the process shows nothing more, and may never come
                    return Held(done, seed, now - started)
                begun = begun or now
                if done == FIRST and not estimated and runs > FIRST:
                    estimated = True
                    left = (now - begun) / (FIRST - 1) * (runs - FIRST)
                    say(f"{runs:,} schedules take about {max(left, 1):.0f} s more on this machine.")
                elif now - reported > 10 and estimated:
                    reported = now
                    say(f"{done:,} of {runs:,} schedules, {(now - begun) / done * (runs - done):.0f} s left")
        finally:
            end_family(p)


def _read(stream: Any, lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


# ---- in the child process --------------------------------------------------------------------------------


def one_schedule(
    files: Sequence[str],
    own: dict[str, str],
    seed: int,
    number: int,
    *,
    states: bool = False,
    priorities: bool = False,
) -> Report:
    """Run one schedule with the plugins ``files``, and return its report. ``own``: group → the student's name.

    With ``states``, each request has a recurrent state, and there are no drafts. With ``priorities``, requests have
    priorities, for a policy that uses them. Raise AssertionError if a promise is broken.
    """
    from minisgl.chapters.lab.grader.simulated_workloads import jobs_of, random_workload, shipped_cache, spec_of
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.testing.drive import Drive, make_plugin

    rng = random.Random(f"{seed} {number}")
    workload = random_workload(rng, 1 + number % 12)
    while not workload["jobs"]:
        workload = random_workload(rng, 12)
    for job in workload["jobs"] if priorities else ():
        job["priority"] = rng.randint(0, 2)
    spec, manager = replace(spec_of(workload), has_states=states), PluginManager()
    for file in files:
        manager.add(file)

    def build(group: str, **given: Any) -> Any:
        return manager.build(group, manager.make(group, own[group]), **given)

    cache = (
        build("cache", page_size=spec.page_size, spec=spec)
        if "cache" in own
        else shipped_cache("radix", spec.page_size)
    )
    policy = build("scheduler") if "scheduler" in own else make_plugin("scheduler", "mixed")
    drafts: dict[str, Any] = {}
    if "speculation" in own and rng.random() < 0.5:
        drafts = {"proposer": build("speculation", spec=spec)}
    elif rng.random() < 0.3 and not states:
        drafts = {"drafts": (4, 70, number)}
    drive = Drive(
        spec,
        cache,
        policy,
        overlap=rng.random() < 0.7,
        max_prefill_tokens=workload["chunk"],
        starvation_steps=rng.choice([4, 64]),
        observers=manager.hook,
        thorough=False,
        **drafts,
    )
    drive.run(jobs_of(workload), max_steps=20_000)
    drive.check_whole_pool()
    for plugin in manager._manager.get_plugins():
        findings = getattr(plugin, "findings", None)
        if isinstance(findings, list) and findings:
            raise AssertionError(f"the own auditor reports: {findings[0]}")
    return drive.report


def main() -> None:
    """Answer one request of `run_schedules`."""
    request = json.loads(sys.stdin.read())
    channel, sys.stdout = sys.stdout, sys.stderr
    own = dict(word.split("=", 1) for word in request["words"])
    for done, number in enumerate(request["numbers"], 1):
        try:
            one_schedule(request["files"], own, request["seed"], number)
        except Exception as error:  # also the student's own exceptions: they fail the schedule
            text = f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
            print(json.dumps({"failed": number, "text": " ".join(text.split())[:600]}), file=channel, flush=True)
            return
        print(json.dumps({"done": done}), file=channel, flush=True)


if __name__ == "__main__":
    main()
