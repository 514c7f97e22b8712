"""Workloads for the simulated engine, used by gates. A workload is JSON, so that it can be shrunk, saved and replayed.

    {"page_size": 4, "pages": 30, "slots": 3, "chunk": 16,
     "jobs": [{"id": 1, "stem": 0, "shared": 8, "own": 5, "answer": 3, "arrive": 0}]}

``slots`` is the engine's ``max_running_requests`` and ``chunk`` its ``max_prefill_tokens``. A job is one request. Its
prompt has ``shared`` tokens of the common prefix number ``stem``, then ``own`` tokens that no other request has. It
arrives before step ``arrive``, and its answer has ``answer`` tokens. If ``abort`` is given, the request is aborted
``abort`` steps after its arrival. ``priority`` is the request's priority, 0 if it is not given. Knows
`minisgl.testing` and no plugin.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pluggy

from minisgl import hooks
from minisgl.chapters.lab.grader.gate import Broken, Invalid, StudentError, amount
from minisgl.core import EngineSpec, Req, SamplingParams, Step
from minisgl.plugins.cache.base import PrefixCache
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
    """Return a random workload of at most ``1 + size`` requests, and never more than 12, many with a common prefix.

    The pool holds only a few of the requests at a time. With ``aborts``, some of the requests are aborted.
    """
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
    """Return the sizes of the workload's engine. Raise `Invalid` if a size is below 1."""
    size, pages, slots = workload["page_size"], workload["pages"], workload["slots"]
    if min(size, pages, slots, workload.get("chunk", 1)) < 1:
        raise Invalid
    return EngineSpec(
        page_size=size, num_pages=pages, max_running_requests=slots, max_seq_len=pages * size + 8, vocab_size=VOCAB
    )


def jobs_of(workload: Mapping[str, Any]) -> list[Job]:
    """Return the workload's requests. Raise `Invalid` if the engine would reject one of them."""
    room = workload["pages"] * workload["page_size"]
    jobs = []
    for job in workload["jobs"]:
        shared, own, answer = job["shared"], job["own"], job["answer"]
        if answer < 1 or own < 1 or job["id"] < 0 or shared + own + answer > room:
            raise Invalid
        stem = [(1009 * job["stem"] + 31 * i) % 20_000 for i in range(shared)]
        tail = [20_000 + (1511 * job["id"] + 17 * i) % 30_000 for i in range(own)]
        abort = job["arrive"] + job["abort"] if "abort" in job else None
        priority = job.get("priority", 0)
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, priority=priority)
        jobs.append(Job(job["id"], stem + tail, params, job["arrive"], abort))
    if len({job.uid for job in jobs}) < len(jobs):
        raise Invalid
    return jobs


def simulate(
    workload: Mapping[str, Any],
    cache: Any,
    policy: Any,
    *,
    causes: Callable[[str], str | None] | None = None,
    **options: Any,
) -> Report:
    """Run the workload through the real scheduler and return the run's report.

    ``causes`` maps a rule of `minisgl.testing.violation.RULES`, or the text of another failure, to one of the lab's
    causes, or to None. Raise `Broken` if a promise is broken, and `Invalid` if the workload has no requests.
    """
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
    """Turn a failed check of the engine into `Broken`. An assertion in the student's own code is returned unchanged."""
    if isinstance(error, SimViolation):
        cause = (causes and causes(error.rule)) or "promise"
        from minisgl.testing.violation import RULES

        return Broken(cause, RULES[error.rule], error.text, step=error.step, request=error.uid, page=error.page)
    text = " ".join(str(error).split())
    if isinstance(error, StudentError):
        return error
    if isinstance(error, AssertionError) and not _raised_by_minisgl(error):
        return error
    cause = (causes and causes(text)) or "promise"
    request = re.search(r"requests? \[?(\d+)", text)
    if isinstance(error, PolicyError):
        promise = "The scheduler can carry out the policy's plan."
    else:
        promise = "The engine keeps its promises with this plugin."
    return Broken(cause, promise, text, step=step, request=int(request[1]) if request else None)


def _raised_by_minisgl(error: BaseException) -> bool:
    """Return whether a module of minisgl raised the exception."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is None or str(last.tb_frame.f_globals.get("__name__", "")).startswith("minisgl.")


class Gaps:
    """An observer that measures the worst gap in tokens.

    ``worst`` is the largest number of tokens that the engine computed, for all requests together, between two
    consecutive tokens of one answer. Pass `relay` to `Drive`. The number is exact without overlap.
    """

    def __init__(self) -> None:
        self.worst = self.computed = 0
        self._last: dict[int, int] = {}  # uid -> `computed` when the request gained its most recent token
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        self._manager.register(self)

    @property
    def relay(self) -> Any:
        """The pluggy relay that calls this observer's hooks."""
        return self._manager.hook

    @hooks.hookimpl
    def minisgl_batch_scheduled(self, step: Step) -> None:
        """Count the step's tokens."""
        self.computed += len(step.input_ids)

    @hooks.hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None]) -> None:
        """Update the worst gap for each request that gained a token."""
        for req in reqs:
            if req is not None:
                self.worst = max(self.worst, self.computed - self._last.get(req.uid, self.computed))
                self._last[req.uid] = self.computed


def shipped_cache(name: str, page_size: int) -> PrefixCache:
    """Return a shipped cache, built without torch and C++. Raise `Invalid` if ``page_size`` is below 1."""
    if page_size < 1:
        raise Invalid
    options = {"compare": "numpy"} if name == "radix" else {}
    cache: PrefixCache = make_plugin("cache", name, page_size=page_size, **options)
    return cache


def least_prefill(jobs: list[Job], page_size: int) -> int:
    """Return the least possible number of prompt tokens to compute, in order of arrival.

    Each page of a common prefix is computed once. Of each prompt at least the last token is computed.
    """
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
    """Describe the workload: one line for the engine, then one line for each request."""
    running = f"at most {amount(workload['slots'], 'running request')}"
    head = f"{amount(workload['pages'], 'page')} of {amount(workload['page_size'], 'token')}, {running}"
    lines = [head + (f", max_prefill_tokens {workload['chunk']}" if "chunk" in workload else "")]
    for job in workload["jobs"]:
        shared = f"{amount(job['shared'], 'token')} of common prefix {job['stem']} and " if job["shared"] else ""
        abort = ""
        if "abort" in job:
            abort = f", aborted {amount(job['abort'], 'step')} later" if job["abort"] else ", aborted at once"
        prompt = f"a prompt of {shared}{amount(job['own'], 'own token')}, an answer of {amount(job['answer'], 'token')}"
        prompt += f", priority {job['priority']}" if "priority" in job else ""
        lines.append(f"request {job['id']}: arrives at step {job['arrive']}, {prompt}{abort}")
    return "\n".join(lines)
