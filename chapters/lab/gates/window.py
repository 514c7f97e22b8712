"""Gates of lab `window`: what a query reads, the longest valid prefix, and the pages behind windows; then schedules.

What is read follows from lists of positions, and a valid prefix from its definition. The third part is graded on the
real scheduler: each call of `clear_behind` is compared with what should happen, and `WindowDrive` checks all pages.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.executed_lines import counted_lines
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student, amount
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.simulated_workloads import jobs_of, random_workload, show, translate
from minisgl.chapters.lab.grader.window_calls import Watch
from minisgl.chapters.lab.grader.window_trees import Tree, make_tree, show_tree, why_length
from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugins.cache.grouped.tree import PageTree
from minisgl.scheduler.planner import PolicyError
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.kv_groups import WindowDrive, group
from minisgl.testing.truth import expected_output
from minisgl.testing.violation import SimViolation

VOCAB = 50_000
WINDOWS = ([-1, 5], [-1, 8], [-1, 1, 5], [9], [-1, 9, 9], [2, 30], [-1, 16], [-1], [48, -1])
"""Windows of the groups of random engines."""


def build(student: Student, spec: EngineSpec) -> Any:
    """Return the student's cache."""
    return student.make(spec=spec)


def spec_of(windows: Sequence[int], page_size: int, chunk: int = 16, **sizes: int) -> EngineSpec:
    """Return the sizes of an engine. Raise `Invalid` if one of them is meaningless."""
    if page_size < 1 or chunk < 1 or not windows or any(w < 1 and w != -1 for w in windows):
        raise Invalid
    groups = tuple(group(window, page_size, chunk) for window in windows)
    default = EngineSpec(page_size, 200, 4, 400, VOCAB, groups)
    return replace(default, **sizes)  # type: ignore[arg-type]  # no field of a number is given another type


def module_of(student: Student) -> Any:
    """Return the student's module, with the functions of the skeleton."""
    module = sys.modules[student.plugin_manager.schema("cache", student.lab.name).__module__]
    for name in ("tail_pages", "first_columns"):
        if not hasattr(module, name):
            raise Broken("lacks-name", "The file has `tail_pages` and `first_columns`.", f"The file has no `{name}`.")
    return module


# ---- what a query reads -----------------------------------------------------------------------------------------


def make_reads(rng: random.Random, size: int) -> dict[str, Any]:
    """Return windows, a page size and positions. The first workloads have small windows and pages of one token."""
    page = 1 if size <= 3 else rng.choice([1, 2, 3, 4, 16])
    windows = (
        [size] if size <= 3 else [rng.choice([-1, rng.randint(1, 3 * page), rng.randint(1, 60)]) for _ in range(3)]
    )
    positions = [rng.randint(0, rng.choice([page, 3 * page, 100])) for _ in range(1 if size <= 3 else 4)]
    return {"windows": windows, "page_size": page, "positions": positions}


def show_reads(workload: dict[str, Any]) -> str:
    """Describe windows, page size and positions."""
    windows = ", ".join("none" if w < 0 else str(w) for w in workload["windows"])
    positions = ", ".join(map(str, workload["positions"]))
    return f"windows {windows}; pages of {amount(workload['page_size'], 'token')}; queries at {positions}"


def positions_read(position: int, window: int) -> range:
    """Return the positions that a query reads."""
    return range(0 if window < 0 else max(position - window + 1, 0), position + 1)


def run_reads(student: Student, workload: dict[str, Any]) -> None:
    """Compare `tail_pages` and `first_columns` with lists of positions."""
    module, size, windows = module_of(student), workload["page_size"], workload["windows"]
    if size < 1 or not windows or not workload["positions"] or any(w < 1 and w != -1 for w in windows):
        raise Invalid
    if min(workload["positions"]) < 0:
        raise Invalid
    for window in windows:
        judge_tail(module.tail_pages(window, size), window, size)
    positions, array = np.array(workload["positions"], np.int32), np.array(windows, np.int32)
    given = positions.copy(), array.copy()
    found = module.first_columns(positions, array, size)
    if not np.array_equal(given[0], positions) or not np.array_equal(given[1], array):
        raise Broken("changes", "`first_columns` changes no argument.", "An array has other numbers afterwards.")
    judge_columns(found, positions, array, size)


def judge_tail(found: Any, window: int, size: int) -> None:
    """Compare one result of `tail_pages`."""
    promise = "`tail_pages` returns how many pages of a long prefix the next query reads."
    if not isinstance(found, (int, np.integer)) or isinstance(found, bool):
        raise Broken("form", promise, f"It returned {type(found).__name__}, and not a number of pages.")
    if window < 0:
        if found < 2**24:
            seen = f"With window -1 it returned {found}, which is less than a long prefix has."
            raise Broken("no-window", promise, seen)
        return
    border = size * (window + 2)
    right = len({at // size for at in positions_read(border, window) if at < border})
    if found == right:
        return
    seen = f"tail_pages({window}, {size}) returned {found}; expected {right}."
    if found == -(-window // size):
        raise Broken("own", promise, seen)
    if found == (window - 1) // size:
        raise Broken("partly", promise, seen)
    raise Broken("reads", promise, seen)


def judge_columns(found: Any, positions: Any, windows: Any, size: int) -> None:
    """Compare a result of `first_columns`, and name the mistake that leads to just this result."""
    promise = "`first_columns` returns the first page that each query reads in each group."
    shape = (len(positions), len(windows))
    if not isinstance(found, np.ndarray) or found.dtype != np.int32 or found.shape != shape:
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
        raise Broken("form", promise, f"It returned {got}; expected int32 {list(shape)}.")
    right = np.array([[positions_read(int(p), int(w))[0] // size for w in windows] for p in positions])
    if np.array_equal(found, right):
        return
    row, column = (int(i) for i in np.argwhere(found != right)[0])
    window = int(windows[column])
    seen = f"Position {positions[row]}, {'no window' if window < 0 else f'window {window}'}, pages of {size}: "
    seen += f"{found[row, column]}; expected {right[row, column]}."
    if window < 0:
        raise Broken("no-window", promise, seen)
    if found[row, column] < 0:
        raise Broken("negative", promise, seen)
    begin, limited = positions[:, None] - windows, windows >= 0
    others: list[tuple[str, Any]] = [
        ("own", np.maximum(begin, 0) // size),
        ("own", np.maximum(begin + 2, 0) // size),
        ("partly", -(-np.maximum(begin + 1, 0) // size)),
    ]
    for cause, other in others:
        if np.array_equal(found[:, limited], other[:, limited]):
            raise Broken(cause, promise, seen)
    raise Broken("reads", promise, seen)


# ---- matches ------------------------------------------------------------------------------------------------------


def run_match(student: Student, workload: dict[str, Any]) -> None:
    """Compare each match with the longest valid prefix, found by trying every length."""
    tree = Tree(workload, lambda spec: build(student, spec), spec_of)
    try:
        for space, ids in workload["asks"]:
            tree.judge(space, ids)
    except Broken as broken:
        if broken.cause in ("short", "long"):
            key = id(student), broken.cause
            if key not in _why:
                _why[key] = why_length(lambda spec: build(student, spec), spec_of, broken.cause)
            broken.cause = _why[key]
        raise


_why: dict[tuple[int, str], str] = {}
"""The mistake of a student's matches that are too short, or too long: it is searched once."""


def match_work(student: Student) -> str:
    """Count the lines of a match of 400 pages, where all but the last pages of the windows were evicted."""
    pages, windows = 400, [-1, 256, 256, 256, 256, 256]
    prompt = list(range(pages))
    missing = [[at, g] for g in range(1, 6) for at in range(pages) if at % 3 == g % 3 and at < pages - 256]
    tree = Tree(
        {"windows": windows, "page_size": 1, "prompts": [[0, prompt, missing]], "locked": [], "asks": []},
        lambda spec: build(student, spec),
        lambda given, size: spec_of(given, size, num_pages=4000, max_seq_len=1000),
    )
    with counted_lines(student.path) as executed:
        tree.judge(0, prompt)
        lines = executed()
    most = 40 * pages * len(windows)
    if lines > most:
        seen = f"A match of {pages} pages in {len(windows)} groups executed {lines:,} lines."
        raise Broken("quadratic", f"It executes at most {most:,} lines: 40 for each page and group.", seen)
    return f"{lines:,} lines for {pages} pages in {len(windows)} groups"


def try_match(student: Student) -> str:
    """Search for a wrong match, and then count the work."""
    note = search(make_tree, run_match, tries=250, at_least=12, show=show_tree)(student)
    return note if student.replay is not None else f"{note}; {match_work(student)}"


# ---- pages behind windows -------------------------------------------------------------------------------------


def make_schedule(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload for an engine with windows, some of whose prompts continue earlier ones."""
    workload = random_workload(rng, size)
    for index, job in enumerate(workload["jobs"]):
        if index and rng.random() < 0.3:
            job["after"], job["arrive"] = rng.randrange(index), job["arrive"] + rng.randint(2, 20)
    workload["chunk"] = rng.choice([1, 3, 8, 16])
    return {**workload, "windows": rng.choice(WINDOWS), "overlap": rng.randint(0, 1)}


def schedule_of(workload: dict[str, Any]) -> tuple[EngineSpec, list[Job]]:
    """Return the engine and the requests of a workload. The pool holds any one request in all groups."""
    windows, size = workload["windows"], workload["page_size"]
    spec = spec_of(windows, size, workload["chunk"], max_running_requests=workload["slots"], max_seq_len=400)
    if min(workload["pages"], workload["slots"]) < 1 or workload["overlap"] not in (0, 1):
        raise Invalid
    found: list[Job] = []
    for job, given in zip(jobs_of(workload), workload["jobs"], strict=True):
        prompt = list(job.prompt)
        if "after" in given:
            if not 0 <= given["after"] < len(found):
                raise Invalid
            earlier = found[given["after"]]
            prompt = [*earlier.prompt, *expected_output(earlier.request, VOCAB).tokens, *prompt[-5:]]
        if len(prompt) + job.params.max_tokens > 399:
            raise Invalid
        found.append(Job(job.uid, prompt, job.params, job.arrive, job.abort))
    if not found:
        raise Invalid
    longest = max(len(job.prompt) + job.params.max_tokens for job in found)
    pages = max(spec.pages_of(-(-longest // size)), workload["pages"])
    return spec_of(windows, size, workload["chunk"], max_running_requests=workload["slots"], num_pages=pages), found


def show_schedule(workload: dict[str, Any]) -> str:
    """Describe the engine and the requests."""
    windows = ", ".join("none" if w < 0 else str(w) for w in workload["windows"])
    lines = show(workload).split("\n")
    spec, _ = schedule_of(workload)
    lines[0] = f"windows {windows}; {amount(spec.num_pages, 'page')} of{lines[0].split(' of', 1)[1]}"
    for index, job in enumerate(workload["jobs"]):
        if "after" in job:
            lines[1 + index] += (
                f"; its prompt begins with prompt and answer of request {workload['jobs'][job['after']]['id']}"
            )
    return "\n".join(lines)


def run_schedule(student: Student, workload: dict[str, Any]) -> None:
    """Run a workload through the real scheduler, and compare every call of `clear_behind`."""
    spec, jobs = schedule_of(workload)
    try:
        serve(build(student, spec), spec, jobs, workload["chunk"], bool(workload["overlap"]))
    except Broken as broken:
        if broken.cause == "late" and not moves(student):
            broken.cause = "never"
        raise


def moves(student: Student) -> bool:
    """Return whether the student's manager gives up any page of a long request."""
    spec = spec_of([4], 1, 8)
    drive = WindowDrive(spec, build(student, spec), make_plugin("scheduler", "mixed"), max_prefill_tokens=8)
    watch = Watch(drive)
    with contextlib.suppress(Exception):
        drive.run([Job(1, list(range(60)), SamplingParams(max_tokens=9, temperature=0.0))])
    return watch.moved


def serve(
    cache: Any, spec: EngineSpec, jobs: Sequence[Job], chunk: int, overlap: bool, thorough: bool = True
) -> WindowDrive:
    """Serve the requests. Raise `Broken` if a call of `clear_behind` or a check of the engine fails."""
    policy = make_plugin("scheduler", "mixed", order="lpm")
    drive = WindowDrive(spec, cache, policy, max_prefill_tokens=chunk, overlap=overlap, thorough=thorough)
    watch = Watch(drive) if thorough else None
    try:
        drive.run(jobs, max_steps=20_000)
    except (SimViolation, PolicyError, AssertionError) as error:
        if watch is not None and watch.late is not None:
            raise watch.late from error
        raise translate(error, None, drive.report.steps) from error
    if watch is not None and watch.late is not None:
        raise watch.late
    return drive


def count_pages(student: Student) -> str:
    """Count the pages of one long request, and the prompt tokens of a second turn."""
    windows, size, chunk = [-1, 32, 32, 32, 32, 32], 4, 16
    spec = spec_of(windows, size, chunk, num_pages=1000, max_seq_len=1200)
    cache = build(student, spec)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)  # 859 positions: 3 after a border
    first = Job(1, [7 * i % 40_000 for i in range(800)], params)
    drive = serve(cache, spec, [first], chunk, True)
    most = drive.spec.pages_of(-(-860 // size))
    turn = [*first.prompt, *drive.report.tokens[1], 1, 2, 3]
    drive.run([Job(2, turn, params)])
    cached = drive.report.finished[2].cached_tokens
    least = 859 // size * size  # the KV of the last token was never computed
    if cached < least:
        promise = (
            "The next turn of a conversation finds its whole pages, although the pages behind windows may be gone."
        )
        seen = f"The second turn has {len(turn)} tokens, and {cached} were found; expected at least {least}."
        raise Broken("short", promise, seen)
    found = f"its next turn finds {cached} of {len(turn)} tokens"
    return f"a request of 860 tokens needs {most} pages instead of {6 * 215}, and {found}"


# ---- the number to beat -------------------------------------------------------------------------------------------

ENOUGH, TIMES = 1.2, "times the tokens that eviction by last use finds"
"""The number to beat. A good order of eviction finds from 1.28 to 1.62 times as many, all windows first 0.5."""


def conversations(rng: random.Random, chats: int = 12, turns: int = 5) -> list[Job]:
    """Return the turns of conversations with a common beginning, in random order."""
    stem = [rng.randrange(VOCAB) for _ in range(32)]
    texts, arrive = [list(stem) for _ in range(chats)], 0
    jobs: list[Job] = []
    for _ in range(turns):
        for chat in rng.sample(range(chats), chats):
            texts[chat] += [rng.randrange(VOCAB) for _ in range(rng.randint(40, 60))]
            params = SamplingParams(max_tokens=rng.randint(4, 12), temperature=0.0, ignore_eos=True)
            jobs.append(Job(len(jobs) + 1, list(texts[chat]), params, arrive))
            texts[chat] += expected_output(jobs[-1].request, VOCAB).tokens
            arrive += rng.randint(3, 8)
    return jobs


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Compare the student's `evict` with that of the base class, in conversations that no file knows."""
    rng, found = student.random, {"own": 0, "lru": 0}
    for _ in range(2):
        jobs = conversations(rng)
        for order in found:
            spec = spec_of([-1, 32, 32], 4, 64, num_pages=600, max_seq_len=2000)
            cache = build(student, spec)
            if type(cache).evict is PageTree.evict:
                return f"1.00 {TIMES}", False
            if order == "lru":
                cache.evict = MethodType(PageTree.evict, cache)
            found[order] += serve(cache, spec, jobs, 64, True, thorough=False).report.cached_tokens
    ratio = found["own"] / found["lru"]
    return f"{ratio:.2f} {TIMES}", round(ratio, 2) >= ENOUGH


GATES = (
    Gate(
        "reads",
        "the pages that a query reads, by listing its positions",
        search(make_reads, run_reads, tries=300, at_least=40, show=show_reads),
        part="window.reads",
    ),
    Gate(
        "match",
        "the longest prefix that is valid in all groups, by trying every length",
        try_match,
        part="window.match",
        needs=("reads",),
    ),
    Gate(
        "behind",
        "each step gives up exactly the pages that no later query and no next turn reads",
        search(make_schedule, run_schedule, tries=120, at_least=10, seconds=2.0, show=show_schedule),
        part="window.behind",
        needs=("reads", "match"),
    ),
    Gate("counts", "the pages of a long request, and the hit of its next turn", count_pages),
    facts(["match"]),
)
STRETCH = Stretch(
    "In conversations that do not fit into the pool, the order of eviction decides what is found again. By last use, "
    f"the number is 1.00. Find {ENOUGH:.2f} times as many tokens with an `evict` of your own in `MyCache`. The "
    "conversations are new in each run.",
    measure_stretch,
)
