"""Runs a piece's plugin: on the piece's own workload, with a trace, and on random schedules.

``python -m minisgl.chapters.lab.museum.runs`` reads a JSON request from its standard input, and writes a JSON line: the
student's code runs in a process of its own. The real scheduler runs on the simulated engine, which checks every step.

A workload has the sizes of an engine and its requests::

    {"page_size": 4, "pages": 30, "rows": 4, "chunk": 64, "guard": true, "patience": 64,
     "jobs": [{"id": 1, "prompt": [[0, 8], [100, 4]], "answer": 6, "arrive": 0, "abort": 9, "salt": "a", "after": 2}],
     "flood": {"count": 30, "from": 3, "every": 2, "prompt": [[0, 24]], "own": 3, "answer": 4}}

``chunk`` is ``max_prefill_tokens``, and ``patience`` is ``starvation_steps``; without ``guard``, no starvation guard
wraps the policy. With ``states``, each request has a recurrent state, and random schedules have no drafts. With
``priorities``, the requests of random schedules have priorities, as jobs may have with ``priority``. A part
``[first, count]`` of a prompt is the tokens from ``first`` on. With ``after``, the prompt begins with prompt and
answer of an earlier job. A flood is ``count`` more requests, one ``every`` some steps, whose prompts end with ``own``
tokens that no other request has.
"""

from __future__ import annotations

import ast
import copy
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.grader.gate_process import ImportGuard
from minisgl.chapters.lab.grader.simulated_workloads import shipped_cache
from minisgl.chapters.lab.mine.schedules import one_schedule
from minisgl.chapters.lab.museum import calls
from minisgl.chapters.lab.museum.calls import said
from minisgl.chapters.lab.museum.pieces import NAME, Piece, find_piece
from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.scheduler.guard import StarvationGuard
from minisgl.scheduler.page_allocator import PageOwnershipError
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.drive import Job, Report, make_plugin
from minisgl.testing.traced import traced
from minisgl.testing.truth import expected_output
from minisgl.testing.violation import SimViolation
from minisgl.trace.check import check
from minisgl.trace.events import Add, Batch, Finish
from minisgl.trace.read import read
from minisgl.trace.violation import Violation

__all__ = ["Counts", "jobs_of", "play", "run"]

VOCAB = 50_000
MOST_STEPS = 5_000
"""Steps of the scheduler's loop after which a run counts as endless."""
SCHEDULES = 60
"""Random schedules that a mended file must survive."""


@dataclass
class Counts:
    """What a run counted: prompt tokens that were computed, and steps.

    ``waited`` and ``lasted``: turns of the scheduler's loop from each request's arrival to its first token, and to its
    final reply, summed. They are counted only on the piece's own workload.
    """

    computed: int = 0
    steps: int = 0
    waited: int = 0
    lasted: int = 0

    def add(self, report: Report) -> None:
        """Add the counts of one run."""
        self.computed += report.counts.prompt_tokens
        self.steps += report.counts.steps


def jobs_of(workload: Mapping[str, Any]) -> list[Job]:
    """Return the requests of a workload."""
    jobs: dict[int, Job] = {}
    for each in workload["jobs"]:
        prompt = [token for first, count in each["prompt"] for token in range(first, first + count)]
        if "after" in each:
            earlier = jobs[each["after"]]
            prompt = [*earlier.prompt, *expected_output(earlier.request, VOCAB).tokens, *prompt]
        params = SamplingParams(
            max_tokens=each["answer"],
            temperature=0.0,
            ignore_eos=True,
            cache_salt=each.get("salt"),
            priority=each.get("priority", 0),
        )
        jobs[each["id"]] = Job(each["id"], prompt, params, each.get("arrive", 0), each.get("abort"))
    flood = workload.get("flood", {"count": 0})
    for i in range(flood["count"]):
        own = [20_000 + 100 * i, flood["own"]]
        each = {"id": 1000 + i, "prompt": [*flood["prompt"], own], "answer": flood["answer"]}
        jobs |= {job.uid: job for job in jobs_of({"jobs": [{**each, "arrive": flood["from"] + flood["every"] * i}]})}
    return list(jobs.values())


class PoolNotWholeError(AssertionError):
    """After the workload, a request that needs every page of the pool could not be served."""


def _bare(engine: Any, cache: Any, policy: Any, **options: Any) -> Scheduler:
    """Build a scheduler whose policy has no starvation guard around it."""
    return Scheduler(engine, cache, policy.policy if isinstance(policy, StarvationGuard) else policy, **options)


def run(piece: Piece, file: Path, trace: Path) -> tuple[Report, Exception | None]:
    """Serve the piece's workload with the plugin ``file``, and record a trace.

    Return the report, and the failure that ended the run, or None.
    """
    work, manager = piece.workload, PluginManager()
    manager.add(str(file))
    size = work["page_size"]
    states = work.get("states", False)
    spec = EngineSpec(size, work["pages"], work["rows"], work["pages"] * size, vocab_size=VOCAB, has_states=states)
    given = {"page_size": size, "spec": spec} if piece.group == "cache" else {}
    own = manager.build(piece.group, manager.make(piece.group, NAME), **given)
    cache = own if piece.group == "cache" else shipped_cache("radix", size)
    policy = own if piece.group == "scheduler" else make_plugin("scheduler", "mixed")
    options = {"max_prefill_tokens": work["chunk"], "starvation_steps": work.get("patience", 64)}
    scheduler = {} if work.get("guard", True) else {"scheduler": _bare}
    with traced(trace, spec, cache, policy, thorough=False, **options, **scheduler) as drive:
        try:
            drive.run(jobs_of(work), max_steps=MOST_STEPS)
        except Exception as error:  # also those of the plugin itself
            return drive.report, error
        report = copy.deepcopy(drive.report)
        try:
            drive.check_whole_pool()
        except Exception as error:
            return report, PoolNotWholeError(said(error))
        return report, None


def waits_of(trace: Path, report: Report) -> dict[int, int]:
    """Return for each request of a run how many turns of the scheduler's loop it waited for its first token."""
    added = {event.uid: round(event.t) for event in read(trace) if isinstance(event, Add)}  # the clock counts turns
    return {uid: first - added[uid] for uid, first in report.first_token.items()}


def turns_of(trace: Path) -> int:
    """Return how many turns of the scheduler's loop the requests of a run were open, summed."""
    events = list(read(trace))
    added = sum(round(event.t) for event in events if isinstance(event, Add))
    return sum(round(event.t) for event in events if isinstance(event, Finish)) - added


def violation_of(trace: Path) -> Violation | None:
    """Return the first promise that the trace checker finds broken in a trace, or None."""
    return check(read(trace))


def symptom(error: Exception | None, turns: int) -> str:
    """Return what an operator of the engine sees of a failure: the effect, not the cause.

    ``turns`` is the number of turns of the scheduler's loop before it.
    """
    if error is None:
        return "All requests got their right answers, and the pool is whole."
    text = str(error)
    if isinstance(error, SimViolation) or text.startswith(("promise 8", "usage")):
        return "A request would get another answer than it gets alone."
    if isinstance(error, PoolNotWholeError):
        return "After the last request, pages are missing: a request that needs the whole pool is not served."
    if "stuck" in text or "still open" in text:
        return "Some requests got no answer."
    if isinstance(error, PageOwnershipError) and not ("idle" in text or "lost" in text or "the cache says" in text):
        return f"The scheduler stopped in turn {turns} of its loop, and every open request got an error."
    if isinstance(error, AssertionError):
        return "After the last request, the engine is not as it was before the first: the pool is not whole."
    return f"The scheduler stopped in turn {turns} of its loop with {type(error).__name__}."


# ---- in the child process --------------------------------------------------------------------------------


def missing(piece: Piece, text: str) -> str | None:
    """Return the first of the piece's classes and methods that ``text`` does not define, or None."""
    found = set()
    for node in ast.parse(text, piece.file).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name}
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return next((name for name in piece.keep if name not in found), None)


def play(piece: Piece, file: Path, seed: int, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the counts of a plugin on the piece's workload and on random schedules, or the promise that it breaks."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.jsonl"
        report, error = run(piece, file, trace)
        found = violation_of(trace)
        if found is not None:
            shown = (int(found.promise.split()[1]), found.step) in piece.answers.items()
            how = "is still broken in" if shown else "is now first broken in"
            return {"broken": f"{found.promise} {how} step {found.step}: {found.text}"}
        if error is not None:
            return {"broken": said(error)}
        own = Counts(waited=sum(waits_of(trace, report).values()), lasted=turns_of(trace))
    random = Counts()
    own.add(report)
    for number in numbers:
        try:
            kinds = {kind: piece.workload.get(kind, False) for kind in ("states", "priorities")}
            random.add(one_schedule([str(file)], {piece.group: NAME}, seed, number, **kinds))
        except Exception as failure:
            text = said(failure)
            return {"broken": f"Random schedule {number} of seed {seed}: {text}"}
    return {"own": asdict(own), "random": asdict(random)}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request: ``show`` a piece's plugin, or ``play`` a mended one."""
    piece, file = find_piece(request["piece"]), Path(request["file"])
    if request["do"] == "show" and piece.driver:
        shown: dict[str, Any] = calls.show_calls(piece, file, Path(request["trace"]))
        return shown
    if request["do"] == "show":
        report, error = run(piece, file, Path(request["trace"]))
        waits = waits_of(Path(request["trace"]), report)
        longest = max(waits, key=lambda uid: waits[uid], default=0)
        counted = {"requests": len(report.tokens), "answered": len(report.finished), "steps": report.counts.steps}
        if error is not None and not isinstance(error, PoolNotWholeError):  # with the steps whose result was not read
            counted["steps"] = sum(isinstance(event, Batch) for event in read(Path(request["trace"])))
        last = error is None or isinstance(error, PoolNotWholeError)  # whether the trace has the request for the pool
        shown = {"symptom": symptom(error, report.steps), "longest": [longest, waits.get(longest, 0)], "last": last}
        return {**shown, **counted}
    if request.get("guarded"):
        gone = missing(piece, file.read_text("utf-8"))
        if gone is not None:
            return {"broken": f"The file has no `{gone}` any more, so it is not this piece."}
        sys.meta_path.insert(0, ImportGuard(file, piece.forbidden))
    numbers = range(1, request.get("schedules", SCHEDULES) + 1)
    if piece.driver:
        played: dict[str, Any] = calls.play_calls(piece, file, request["seed"], numbers)
        return played
    return play(piece, file, request["seed"], numbers)


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.read())
    channel, sys.stdout = sys.stdout, sys.stderr  # a student's print() does not go between the lines
    try:
        result = answer(request)
    except Exception as error:  # also the student's own exceptions: they are the verdict
        result = {"broken": said(error)}
    print(json.dumps(result), file=channel, flush=True)


if __name__ == "__main__":
    main()
