"""Workloads on the simulated engine, for gates: as JSON, so that they can be made smaller, kept and replayed.

    {"page_size": 4, "pages": 30, "slots": 3, "chunk": 16,
     "jobs": [{"id": 1, "stem": 0, "shared": 8, "own": 5, "answer": 3, "arrive": 0}]}

A job's prompt is ``shared`` tokens of stem ``stem``, then ``own`` tokens that no other id has; ``abort`` is how many
steps after its arrival the client hangs up. Knows `minisgl.testing` and no plugin.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pluggy

from minisgl import hooks
from minisgl.core import EngineSpec, Req, SamplingParams, Step
from minisgl.course.lab.grader.gate import Broken, Invalid
from minisgl.kvcache import PrefixCache
from minisgl.scheduler.planner import PolicyError
from minisgl.testing.drive import Drive, Job, Report, make_plugin
from minisgl.testing.violation import SimViolation

__all__ = [
    "Gaps",
    "jobs_of",
    "least_prefill",
    "random_workload",
    "shipped_cache",
    "show",
    "simulate",
    "spec_of",
    "translate",
]

VOCAB = 50_000


def random_workload(rng: random.Random, size: int, aborts: bool = True) -> dict[str, Any]:
    """A pool that holds a few requests, and up to ``size`` clients (at most 12) that often share a stem."""
    page_size = rng.choice([1, 2, 3, 4, 8])
    pages = rng.randint(max(4, 12 // page_size), max(8, 80 // page_size))
    room = pages * page_size
    jobs: list[dict[str, int]] = []
    for i in range(rng.randint(1, min(1 + size, 12))):
        answer = rng.randint(1, rng.choice([2, 8, max(room // 4, 2)]))
        most = room - answer
        if most < 2:
            continue
        length = rng.randint(1, rng.choice([min(6, most), most // 2 + 1, most]))
        shared = rng.randint(0, length - 1) if rng.random() < 0.7 else 0
        job = {"id": i + 1, "stem": rng.randint(0, 1), "shared": shared, "own": length - shared, "answer": answer,
               "arrive": rng.choice([0, 0, 1, 4, 4, 9, 20])}  # fmt: skip
        if aborts and rng.random() < 0.2:
            job["abort"] = rng.randint(0, 20)
        jobs.append(job)
    chunk = rng.choice([1, 3, 8, 16, 50, 8192])
    return {"page_size": page_size, "pages": pages, "slots": rng.randint(1, 6), "chunk": chunk, "jobs": jobs}


def spec_of(workload: Mapping[str, Any]) -> EngineSpec:
    """The engine that the workload asks for. Raises `Invalid`."""
    size, pages, slots = workload["page_size"], workload["pages"], workload["slots"]
    if min(size, pages, slots, workload.get("chunk", 1)) < 1:
        raise Invalid
    return EngineSpec(
        page_size=size, num_pages=pages, max_running_requests=slots, max_seq_len=pages * size + 8, vocab_size=VOCAB
    )


def jobs_of(workload: Mapping[str, Any]) -> list[Job]:
    """Its clients. Raises `Invalid` where one could not be served at all."""
    room = workload["pages"] * workload["page_size"]
    made = []
    for job in workload["jobs"]:
        shared, own, answer = job["shared"], job["own"], job["answer"]
        if answer < 1 or own < 1 or job["id"] < 1 or shared + own + answer > room:
            raise Invalid
        stem = [(1009 * job["stem"] + 31 * i) % 20_000 for i in range(shared)]
        tail = [20_000 + (1511 * job["id"] + 17 * i) % 30_000 for i in range(own)]
        abort = job["arrive"] + job["abort"] if "abort" in job else None
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        made.append(Job(job["id"], stem + tail, params, job["arrive"], abort))
    if len({job.uid for job in made}) < len(made):
        raise Invalid
    return made


def simulate(
    workload: Mapping[str, Any],
    cache: Any,
    policy: Any,
    *,
    causes: Callable[[str], str | None] | None = None,
    **options: Any,
) -> Report:
    """Run the workload through the real scheduler. Raises `Broken` where a promise is: ``causes`` may name the lab's
    cause for a rule of `minisgl.testing.RULES`, or for the text of another failure."""
    options = {"max_prefill_tokens": workload.get("chunk", 8192), "thorough": False, **options}
    spec, jobs = spec_of(workload), jobs_of(workload)
    if not jobs:
        raise Invalid
    drive = Drive(spec, cache, policy, **options)
    try:
        return drive.run(jobs, max_steps=20_000)
    except (SimViolation, PolicyError, AssertionError) as error:
        raise translate(error, causes, drive.report.steps) from error


def translate(error: Exception, causes: Callable[[str], str | None] | None, step: int | None = None) -> Exception:
    """A failed check of the engine as a verdict; an assertion of the student's own stays what it is."""
    if isinstance(error, SimViolation):
        cause = (causes and causes(error.rule)) or "promise"
        from minisgl.testing.violation import RULES

        return Broken(cause, RULES[error.rule], error.text, step=error.step, request=error.uid, page=error.page)
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and not _of_the_drive(error):
        return error
    cause = (causes and causes(text)) or "promise"
    request = re.search(r"requests? \[?(\d+)", text)
    promise = (
        "A plan can be carried out." if isinstance(error, PolicyError) else "The engine keeps its promises with it."
    )
    return Broken(cause, promise, text, step=step, request=int(request[1]) if request else None)


def _of_the_drive(error: BaseException) -> bool:
    """Whether the innermost line is minisgl's."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is None or str(last.tb_frame.f_globals.get("__name__", "")).startswith("minisgl.")


class Gaps:
    """An observer of waiting, in tokens: between two tokens of an answer, ``worst`` tokens were computed for everybody.
    ``Drive(…, hook=gaps.relay)``; exact without overlap."""

    def __init__(self) -> None:
        self.worst = self.computed = 0
        self._last: dict[int, int] = {}  # uid -> computed when it gained its last token
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        self._manager.register(self)

    @property
    def relay(self) -> Any:
        return self._manager.hook

    @hooks.hookimpl
    def minisgl_batch_scheduled(self, step: Step) -> None:
        self.computed += len(step.input_ids)

    @hooks.hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None]) -> None:
        for req in reqs:
            if req is not None:
                self.worst = max(self.worst, self.computed - self._last.get(req.uid, self.computed))
                self._last[req.uid] = self.computed


def shipped_cache(name: str, page_size: int) -> PrefixCache:
    """A cache that ships with minisgl, as it runs without torch. Raises `Invalid` for a page of no tokens."""
    if page_size < 1:
        raise Invalid
    options = {"compare": "numpy"} if name == "radix" else {}
    cache: PrefixCache = make_plugin("cache", name, page_size=page_size, **options)
    return cache


def least_prefill(jobs: list[Job], page_size: int) -> int:
    """Prompt tokens that must be computed where nothing shared is computed twice: each new page of a prefix once, and
    of each prompt at least its last token."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for job in jobs:
        prompt = tuple(job.prompt)
        whole = len(prompt) // page_size
        known = 0
        while known < whole and prompt[: (known + 1) * page_size] in seen:
            known += 1
        known = min(known, (len(prompt) - 1) // page_size)
        total += len(prompt) - known * page_size
        seen |= {prompt[: n * page_size] for n in range(1, whole + 1)}
    return total


def show(workload: Mapping[str, Any]) -> str:
    """The workload in a few lines."""
    head = f"pages: {workload['pages']} of {workload['page_size']} tokens, slots: {workload['slots']}"
    lines = [head + (f", tokens a step: {workload['chunk']}" if "chunk" in workload else "")]
    for job in workload["jobs"]:
        shared = f"{job['shared']} shared (stem {job['stem']}) + " if job["shared"] else ""
        left = f", hangs up after {job['abort']} steps" if "abort" in job else ""
        prompt = f"prompt {shared}{job['own']} tokens, answer {job['answer']}"
        lines.append(f"request {job['id']}: step {job['arrive']}, {prompt}{left}")
    return "\n".join(lines)
