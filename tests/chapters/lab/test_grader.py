"""The grader: verdicts for code that hangs, dies or leaves processes behind, searching, shrinking, and the command."""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import psutil
import pytest

from minisgl.chapters.lab import cli
from minisgl.chapters.lab.catalog import Lab, find, labs, read
from minisgl.chapters.lab.cli import main
from minisgl.chapters.lab.folder import Folder
from minisgl.chapters.lab.gates.capstone import Installed, called_hooks
from minisgl.chapters.lab.gates.grammar import Loose
from minisgl.chapters.lab.gates.policy import show_plan
from minisgl.chapters.lab.grader import grade as grader
from minisgl.chapters.lab.grader import search as search_module
from minisgl.chapters.lab.grader import server_gate
from minisgl.chapters.lab.grader.cache_histories import History
from minisgl.chapters.lab.grader.diagnosis import causes_of, diagnose
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Missing, Student, TimedOut
from minisgl.chapters.lab.grader.gate_process import LOADS
from minisgl.chapters.lab.grader.grade import ForkServer, grade, with_server_gates
from minisgl.chapters.lab.grader.held import container_sizes
from minisgl.chapters.lab.grader.model_parts import show as show_shape
from minisgl.chapters.lab.grader.page_histories import Rules, large_history, special_histories
from minisgl.chapters.lab.grader.search import alarm, search
from minisgl.chapters.lab.grader.server_gate import Served, check_called
from minisgl.chapters.lab.grader.shrink import smallest
from minisgl.chapters.lab.grader.small_grammars import network
from minisgl.chapters.lab.skeletons import solution
from minisgl.chapters.lab.verdicts import LINES, Report, Verdict
from minisgl.testing.drive import make_plugin
from minisgl.testing.serving import patient_timeout

POLICY = find("policy")
PLAN = POLICY.gates[0]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """Start a fork server for the tests of this module."""
    with ForkServer() as server:
        yield server


def policy(tmp_path: Path, plan: str, top: str = "") -> Path:
    """Write a policy whose method ``plan`` has the body ``plan``, with the code ``top`` before the class."""
    path = tmp_path / "my_policy.py"
    body = "\n".join("        " + line for line in plan.splitlines())
    path.write_text(f'''
from dataclasses import dataclass
from minisgl import hookimpl
from minisgl.scheduler import Plan
{top}

@dataclass
class Mine:
    """Mine."""
    order: str = "fcfs"

    def build(self):
        return Policy()

class Policy:
    def plan(self, waiting, running, budget):
{body}

@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine
''')
    return path


def try_plan(fork_server: ForkServer, path: Path, limit: float = 10.0) -> Verdict:
    """Run the gate `plan` on a file."""
    return fork_server.run(POLICY, path, dataclasses.replace(PLAN, limit=limit), seed=1)


def requests_of(verdict: Verdict) -> int:
    """Return the number of requests of the workload, or of the one step, in which the policy failed."""
    step = verdict.workload
    return len(step["jobs"]) if "jobs" in step else len(step["answers"]) + bool(step["begun"]) + len(step["waiting"])


# ---- code that hangs, dies, or leaves processes behind -------------------------------------------------


def test_endless_loop(fork_server: ForkServer, tmp_path: Path) -> None:
    """An endless loop is reported within ten seconds, with its line and its workload."""
    begun = time.monotonic()
    verdict = try_plan(fork_server, policy(tmp_path, "while True: pass"))
    assert time.monotonic() - begun < patient_timeout(10)
    assert (verdict.cause, verdict.green) == ("hangs", False)
    assert "in plan: while True: pass" in verdict.seen
    assert verdict.workload is not None and verdict.show  # the smallest one may have no requests


def test_deadlock(fork_server: ForkServer, tmp_path: Path) -> None:
    """A deadlock is reported within ten seconds."""
    top = "import threading\nlock = threading.Lock()"
    begun = time.monotonic()
    verdict = try_plan(fork_server, policy(tmp_path, "lock.acquire()\nlock.acquire()", top))
    assert time.monotonic() - begun < patient_timeout(10)
    assert verdict.cause == "hangs"


def test_empty_plan(fork_server: ForkServer, tmp_path: Path) -> None:
    """A policy that returns an empty plan is caught with the smallest workload."""
    verdict = try_plan(fork_server, policy(tmp_path, "return Plan([])"))
    assert verdict.cause == "empty"
    assert requests_of(verdict) == 1, "the smallest workload has one request"


def test_watchdog(fork_server: ForkServer, tmp_path: Path) -> None:
    """The watchdog kills code that catches every exception, and the verdict has the workload."""
    loop = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    begun = time.monotonic()
    verdict = try_plan(fork_server, policy(tmp_path, loop), limit=2.0)
    assert time.monotonic() - begun < patient_timeout(5)
    assert verdict.cause == "hangs"
    assert verdict.workload is not None, "the workload that was running, or a smaller one"


def test_import_hangs(fork_server: ForkServer, tmp_path: Path) -> None:
    """A file whose import hangs is killed."""
    path = policy(tmp_path, "return Plan([])", "import time\ntime.sleep(100)")
    assert fork_server.run(POLICY, path, dataclasses.replace(LOADS, limit=1.0), seed=1).cause == "hangs"


@pytest.mark.parametrize("how", ["import os\nos._exit(3)", "import ctypes\nctypes.string_at(0)"])
def test_process_dies(fork_server: ForkServer, tmp_path: Path, how: str) -> None:
    """A process that dies is reported with its workload."""
    verdict = try_plan(fork_server, policy(tmp_path, how))
    assert verdict.cause == "dies"
    assert verdict.show == show_plan(verdict.workload), "described as for any other verdict"


@pytest.mark.parametrize(("top", "cause"), [("", "raises"), ("raise SystemExit(0)", "loads")])
def test_system_exit(fork_server: ForkServer, tmp_path: Path, top: str, cause: str) -> None:
    """SystemExit in a student's file makes the gate red."""
    verdict = try_plan(fork_server, policy(tmp_path, "raise SystemExit(0)", top))
    assert verdict.cause == cause and "SystemExit" in verdict.seen


def test_memory(fork_server: ForkServer, tmp_path: Path) -> None:
    """An allocation above the memory limit is reported."""
    verdict = try_plan(fork_server, policy(tmp_path, "bytearray(1 << 36)"))
    assert verdict.cause == "memory"


def test_no_process_is_left(fork_server: ForkServer, tmp_path: Path) -> None:
    """Processes that the student's code has started are killed."""
    start = "sleep = ['sleep', '1919.25']\nif len(started) < 5:\n"
    start += "    started.append(subprocess.Popen(sleep, start_new_session=True))\nreturn Plan([])"
    try_plan(fork_server, policy(tmp_path, start, "import subprocess\nstarted = []"))
    left = [p for p in psutil.process_iter(["cmdline"]) if "1919.25" in (p.info["cmdline"] or ())]
    _, alive = psutil.wait_procs(left, timeout=5)  # one that was killed may take a moment to end
    assert alive == []


def test_killed_grader(tmp_path: Path) -> None:
    """If the grader is killed, its gate processes end too."""
    path = policy(tmp_path, "return Plan([])", "import time\ntime.sleep(100)")
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.lab", "test", "policy", str(path), "--dir", str(tmp_path)]
    )
    below: list[psutil.Process] = []
    until = time.monotonic() + patient_timeout(20)
    while len(below) < 2 and time.monotonic() < until:
        below = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    assert len(below) == 2, "the fork server and the gate"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=patient_timeout(5))
    assert alive == []


# ---- files that are not a solution ----------------------------------------------------------------------


NOT_PLUGINS = {
    "import error": ("import no_such_package\n", "no_such_package"),
    "syntax error": ("def plan(:\n", "line 1 is not Python"),
    "no hook": ("x = 1\n", "has no hook"),
    "no hookimpl": ("def minisgl_configs():\n    yield\n", "no @hookimpl"),
    "another hook": ("from minisgl import hookimpl\n@hookimpl\ndef minisgl_metrics():\n    return ''\n",
                               "no @hookimpl minisgl_configs"),
    "another name": ("""
from dataclasses import dataclass
from minisgl import hookimpl
@dataclass
class Other:
    def build(self):
        return None
@hookimpl
def minisgl_configs():
    yield "scheduler", "other", Other
""", "not 'mine'"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_PLUGINS)
def test_file_without_plugin(fork_server: ForkServer, tmp_path: Path, what: str) -> None:
    """A file without the lab's plugin fails the gate `loads`, and no other gate runs."""
    text, seen = NOT_PLUGINS[what]
    path = tmp_path / "my_policy.py"
    path.write_text(text)
    report = grade(POLICY, path, fork_server=fork_server)
    first, *others = report.verdicts
    assert first.cause == "loads" and seen in first.seen
    assert not any(verdict.tried for verdict in others) and not report.passed


def test_build_returns_none(fork_server: ForkServer, tmp_path: Path) -> None:
    """A method ``build`` that returns None is reported."""
    path = policy(tmp_path, "return Plan([])")
    path.write_text(path.read_text().replace("return Policy()", "return None"))
    verdict = try_plan(fork_server, path)
    assert verdict.cause == "loads" and "scheduler=mine: build returned an object of the type NoneType" in verdict.seen


MIXED = "minisgl.plugins.scheduler.mixed"
ASK = "('fcfs').plan(waiting, running, budget)"


@pytest.mark.parametrize(
    ("top", "plan"),
    [
        (f"from {MIXED} import MixedPolicy", f"return MixedPolicy{ASK}"),
        ("", f"from minisgl.plugins.scheduler import mixed\nreturn mixed.MixedPolicy{ASK}"),
        ("import importlib", f"return importlib.import_module('{MIXED}').MixedPolicy{ASK}"),
        ("from minisgl.testing.drive import make_plugin", "return make_plugin('scheduler', 'mixed').plan"),
    ],
)
def test_reference_is_refused(fork_server: ForkServer, tmp_path: Path, top: str, plan: str) -> None:
    """A file that imports the reference solution is refused."""
    verdict = try_plan(fork_server, policy(tmp_path, plan, top))
    assert verdict.cause == "reference"
    assert MIXED in verdict.seen


def test_lab_without_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lab without gates raises RuntimeError."""
    path = policy(tmp_path, "return Plan([])")
    monkeypatch.setattr(Lab, "gates", ())
    with pytest.raises(RuntimeError, match="no gates"):
        grade(POLICY, path)


def test_report_passed() -> None:
    """A report passes only if it has gates and all of them ran and are green."""
    report = grader.Report(POLICY, "", "", 0)
    assert not report.passed
    report.verdicts = [Verdict("plan", ""), Verdict("server", "", tried=False)]
    assert not report.passed
    report.verdicts.pop()
    assert report.passed


class FakeServer:
    """A server of which only ``/metrics`` exists."""

    def __init__(self, **samples: float):
        self.samples = samples

    def metrics(self) -> dict[str, float]:
        """Return the samples."""
        return self.samples


def served(path: Path, calls: dict[str, float], sha256: str = "abc") -> Served:
    """Return a server whose /metrics counts ``calls`` of the file."""
    one = Served(POLICY, path, "abc")
    label = f'path="{path}",plugin="my_policy",process="scheduler-0",sha256="{sha256}"'
    one.server = FakeServer(  # type: ignore[assignment]
        **{f'minisgl_plugin_calls_total{{call="{call}",{label}}}': times for call, times in calls.items()}
    )
    return one


def test_file_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gate fails unless /metrics counts a call of the student's own file."""
    monkeypatch.setattr("minisgl.chapters.lab.grader.server_gate.patient_timeout", lambda seconds: 0.0)
    path = tmp_path / "my_policy.py"
    assert check_called(served(path, {"plan": 3.0}), ["plan"], "scheduler-0") == {"plan": 3.0}
    for one in (
        served(path, {"build": 1.0}),
        served(path, {"plan": 0.0}),
        served(path, {"plan": 3.0}, "another file's"),
        served(tmp_path / "elsewhere.py", {}),
    ):
        with pytest.raises(Broken) as caught:
            check_called(one, ["plan"], "scheduler-0")
        assert caught.value.cause == "never-called"


def test_package_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gate of the capstone fails for an observer whose hooks are never called, and names called hooks."""
    monkeypatch.setattr("minisgl.chapters.lab.gates.capstone.patient_timeout", lambda seconds: 0.0)

    class Fake(Installed):
        calls_of: ClassVar[dict[str, dict[str, float]]] = {}

        def calls(self) -> dict[str, dict[str, float]]:
            return self.calls_of

    one = Fake(find("capstone"), tmp_path / "mine.py", "")
    one.hooks = ["minisgl_observer"]
    for calls in ({}, {"scheduler-0": {"minisgl_observer": 1.0, "minisgl_request_retracted": 0.0}}):
        one.calls_of = calls  # type: ignore[misc]
        with pytest.raises(Broken) as caught:
            called_hooks(one)
        assert caught.value.cause == "never-called" and "minisgl_observer" in caught.value.seen
    one.calls_of = {"scheduler-0": {"minisgl_step_planned": 4.0}}  # type: ignore[misc]
    assert called_hooks(one) == "minisgl_step_planned 4× in scheduler-0, as /metrics counts"


# ---- searching and shrinking -----------------------------------------------------------------------------


def test_shrinking() -> None:
    """Shrinking finds the smallest failing workload of twenty random ones."""
    rng = random.Random(5)
    for _ in range(20):
        jobs = [{"id": i, "size": rng.randint(1, 90)} for i in range(12)]
        needed = rng.sample(range(12), 2)
        for i in needed:
            jobs[i]["size"] = rng.randint(30, 90)

        def still(workload: Any, needed: list[int] = needed) -> str | None:
            large = [job["id"] for job in workload["jobs"] if job["size"] >= 30]
            return "broken" if set(needed) <= set(large) else None

        found, said = smallest({"jobs": jobs, "pages": 64}, "broken", still, time.monotonic() + 20)
        assert said == "broken"
        assert found == {"jobs": [{"id": i, "size": 30} for i in sorted(needed)], "pages": 0}


def student() -> Student:
    """Return a student's file that is not loaded."""
    return Student(POLICY, Path("my_policy.py"), seed=3)


def test_search() -> None:
    """A search keeps the cause while it shrinks, and skips meaningless workloads."""

    def run(student: Student, workload: dict[str, int]) -> None:
        if workload["n"] < 2:
            raise Invalid
        if workload["n"] < 5:
            raise Broken("other", "Small workloads pass.", "One failed.")
        if workload["n"] > 7:
            raise Broken("large", "Large workloads pass.", "One failed.", step=workload["n"])

    with pytest.raises(Broken) as caught:
        search(lambda rng, size: {"n": 5 + size}, run)(student())
    assert (caught.value.cause, caught.value.workload, caught.value.step) == ("large", {"n": 8}, 8)
    assert search(lambda rng, size: {"n": 6}, run, tries=9)(student()) == "9 workloads"


def test_search_at_least() -> None:
    """The first workloads run however little time there is."""
    run = search(lambda rng, size: size, lambda student, workload: None, tries=9, seconds=-1.0, at_least=7)
    assert run(student()) == "7 workloads"


def test_search_shows_what_it_found() -> None:
    """Shrinking keeps a workload that can be described: a part behind the failure may be meaningless otherwise."""

    def run(student: Any, workload: Any) -> None:
        if not workload["pairs"]:
            raise Invalid
        raise Broken("skips", "It holds.", "It does not.")

    def show(workload: Any) -> str:
        return " ".join(f"{a}-{b}" for a, b in workload["pairs"])

    with pytest.raises(Broken) as found:
        search(lambda rng, size: {"pairs": [[1, 2], [3, 4]]}, run, show=show)(student())
    assert found.value.workload == {"pairs": [[0, 0]]} and found.value.show == "0-0"


@pytest.mark.parametrize("part", ["pages", "steps", "requests"])
def test_special_histories_have_an_error(part: str) -> None:
    """Each special history of lab `ledger` can happen, and an auditor must report something, except in three."""
    silent = []
    for workload in [*special_histories(part), large_history(part)]:
        rules = Rules()
        if not [found for event in workload["events"] for found in rules.apply(event)]:
            silent.append(workload["events"])
    assert len(silent) == (3 if part == "steps" else 0), silent
    for events in silent:  # a request is retracted and runs again
        assert ["retract", 0] in events


def test_container_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers in containers, of the class, and of the module count, and a deque with a maxlen does not."""

    class Inner:
        def __init__(self) -> None:
            self.values = [1, 2, 3]

    class Owner:
        of_the_class: dict[int, int] = {1: 1}

        def __init__(self) -> None:
            self.nested = {"a": [1, 2], "b": {3}}
            self.inner = Inner()
            self.last = deque([1], maxlen=4)

    monkeypatch.setattr(sys.modules[__name__], "OF_THE_MODULE", {1, 2}, raising=False)
    sizes = container_sizes(Owner())
    assert (sizes["nested"], sizes["inner"], sizes["Owner.of_the_class"], sizes["OF_THE_MODULE"]) == (5, 3, 1, 2)
    assert "last" not in sizes


def test_search_seed() -> None:
    """The workloads depend only on the seed and the gate's name."""
    tried: list[Any] = []
    run = search(lambda rng, size: rng.random(), lambda student, workload: tried.append(workload), tries=3)
    first, again, other = student(), student(), dataclasses.replace(student(), gate="other")
    for one in (first, again, other):
        run(one)
    assert tried[:3] == tried[3:6] != tried[6:]


def test_replay() -> None:
    """A replay runs only the given workload."""
    tried: list[Any] = []
    run = search(lambda rng, size: size, lambda student, workload: tried.append(workload))
    one = student()
    one.replay = 77
    run(one)
    assert tried == [77]


def test_alarm_is_reset() -> None:
    """The alarm is off after its block."""
    with alarm(0.05, 0.05, 0.1):
        pass
    time.sleep(0.2)


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_alarm_counts_waiting_and_not_a_busy_machine() -> None:
    """Code that waits is stopped after ``waiting`` seconds; code that computes may go on until ``most`` seconds."""
    other = threading.Thread(target=compute, args=(3.0,))  # as a thread that another test left behind
    other.start()
    with pytest.raises(TimedOut), alarm(100.0, 1.0, 100.0):
        time.sleep(60)
    other.join()

    def compute_and_wait() -> None:
        compute(0.5)
        time.sleep(60)

    with pytest.raises(TimedOut), alarm(100.0, 1.0, 100.0):
        compute_and_wait()
    with alarm(100.0, 0.1, 100.0):
        compute(0.3)
    with pytest.raises(TimedOut), alarm(100.0, 0.1, 0.2):
        compute(10)


def test_alarm_counts_the_threads_of_the_workload() -> None:
    """Ranks are threads, for which the main thread waits: ranks that compute are no code that waits."""

    def ranks(work: Callable[[], object]) -> None:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)

    with alarm(100.0, 0.4, 100.0):
        ranks(lambda: compute_thread(0.1))
    stop = threading.Event()
    with pytest.raises(TimedOut, match="It waited"), alarm(100.0, 0.4, 100.0):
        ranks(stop.wait)
    stop.set()


def compute_thread(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_verdict_length() -> None:
    """A verdict has at most `LINES` lines, whatever the length of its texts."""
    verdict = Verdict("plan", "says").fail(
        Broken(
            "skips", "word " * 200, "seen " * 300, step=3, request=4, page=5, workload={}, show="line of text\n" * 60
        )
    )
    lines = verdict.explain(POLICY, "python -m minisgl.lab test policy --replay here.json")
    assert len(lines) == LINES
    text = "\n".join(lines)
    assert "step 3, request 4, page 5" in text and "--replay here.json" in text and "more lines" in text
    assert POLICY.causes["skips"][:40] in text
    assert all(len(line) < 130 for line in lines)


def test_explanation_of_a_cause_is_not_cut() -> None:
    for lab in labs():
        for cause in lab.causes:
            text = "".join("".join(Verdict("gate", "says", cause=cause).explain(lab, "")).split())
            assert text.endswith("".join(lab.why(cause).split())), (lab.lab, cause)


def test_page_of_the_course_has_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "course.md").read_text("utf-8")
    (commands,) = (each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction))
    assert [name for name in commands.choices if not re.search(rf"`{name}[` ]", page)] == []


# ---- the command -------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs ``python -m minisgl.lab`` in a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        try:
            status = main(words)
        except SystemExit as error:
            status = error.code  # type: ignore[assignment]
        return Result(status, *capfd.readouterr())

    return run


def test_command(lab: Callable[..., Result], tmp_path: Path) -> None:
    """Start a lab, grade the skeleton, get hints, compare with the solution, and grade the solution."""
    said = lab("start", "radix")
    assert said.status == 0 and "my_radix.py" in said.out and "radix.match" in said.out
    again = lab("start", "radix")
    assert again.status == 2 and "exists already" in again.err
    gates = [word for gate in ("loads", "match", "split") for word in ("--gate", gate)]
    red = lab("test", "radix", *gates)
    assert red.status == 1
    assert "Still to write" in red.out and str(tmp_path / "my_radix.py") in red.out and "sha256" in red.out
    hints = [lab("hint", "radix").out for _ in range(2)]
    assert hints[0].startswith("radix.match, hint 1 of 3") and hints[1].startswith(hints[0])
    assert hints[1].count("hint") == 2
    assert "+" in lab("diff", "radix").out

    (tmp_path / "my_radix.py").write_text(solution(find("radix")))
    assert lab("diff", "radix").out == ""
    green = lab("test", "radix", *gates)
    assert green.status == 0 and "3 of 3 gates green" in green.out and "done" not in green.out

    Folder(tmp_path).remember(find("radix"), green=[gate.name for gate in find("radix").gates], gates=[])
    done = lab("hint", "radix").out
    assert done.startswith("All gates of lab radix are green.") and "minisgl.lab hint radix match\n" in done
    assert lab("hint", "radix.lock").out.startswith("radix.lock, hint 1")
    assert lab("hint", "radix", "match").out.startswith("radix.match, hint 1")


def test_replay_command(lab: Callable[..., Result], tmp_path: Path) -> None:
    """The command that a red gate prints shows the same failure again, with the code's output."""
    path = policy(tmp_path, "print('here I am')\nreturn Plan([])")
    said = lab("test", "policy", "--seed", "7")
    assert said.status == 1 and "here I am" not in said.out + said.err
    again = next(line.split("Again:")[1].split() for line in said.out.splitlines() if "Again:" in line)
    assert again[:5] == ["python", "-m", "minisgl.lab", "test", "policy"]
    replayed = lab(*again[3:])
    assert replayed.status == 1 and "here I am" in replayed.err
    for field in ("Promise:", "Seen:", "Where:", "Why:"):
        line = next(line for line in said.out.splitlines() if field in line)
        assert line in replayed.out
    assert "1 of 7 gates green, next: plan" in lab("status").out
    other = tmp_path / "other"
    other.mkdir()
    assert f"There are no results in {other}" in lab("status", "--dir", str(other)).out
    assert f"1 of {sum(each.num_gates for each in labs())} gates green" in lab("status").out
    path.write_text(path.read_text() + "\n")
    assert "the file has changed since" in lab("status").out


def test_equal_failures(lab: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that two gates find is explained once."""

    def grade(lab: Lab, path: Path, on_verdict: Callable[[Verdict], None], **more: object) -> Report:
        report = Report(lab, str(path), "", 1)
        for gate, seen in (("plan", "One."), ("promises", "One."), ("counts", "Two.")):
            report.verdicts.append(Verdict(gate, gate, cause="empty", promise="P.", seen=seen))
            on_verdict(report.verdicts[-1])
        return report

    monkeypatch.setattr(cli, "grade", grade)
    policy(tmp_path, "return Plan([])")
    said = lab("test", "policy")
    assert said.out.count("Promise: P.") == 2 and "    The same failure as in gate plan.\n" in said.out


def test_watch_command(lab: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs `test` up to the first red gate. `test_watch.py` tests when."""

    def once(path: Path, command: Sequence[str], before_run: Callable[[], None]) -> None:
        before_run()
        assert str(path) == "my_policy.py" and command[1:3] == ["-m", "minisgl.lab"]
        assert main(command[3:]) == 1

    monkeypatch.setattr(cli, "watch", once)
    assert lab("start", "policy").status == 0
    said = lab("watch", "policy")
    assert said.status == 0
    assert "grading my_policy.py, and again when you save it" in said.out
    assert said.out.count("  RED  ") == 1 and "not tried" not in said.out
    assert said.out.splitlines()[-1] == "Next: python -m minisgl.lab start meter"


def test_command_errors(lab: Callable[..., Result]) -> None:
    """Invalid command lines exit with status 2 and a message that says what to do."""
    for words, said in (
        (["start", "polcy"], "Did you mean policy?"),
        (["test", "policy"], "Begin with `python -m minisgl.lab start policy`"),
        (["test", "policy", "nowhere.py"], "there is no such file"),
        (["hint", "policy", "policy.nothing"], "has no part"),
    ):
        result = lab(*words)
        assert result.status == 2 and said in result.err
        assert "Traceback" not in result.err
    assert [line.split()[0] for line in lab("list").out.splitlines()] == [one.lab for one in labs()]


def test_folder_errors(lab: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreadable state, unwritable folders and a deleted current folder give messages, not tracebacks."""
    assert "hint 1 of 3" in lab("hint", "radix").out  # nothing was started
    (tmp_path / ".minisgl-lab" / "state.json").write_text('{"radix": 3, "policy": {"gates": ["plan"]}}')
    assert lab("status").out.count("not graded yet") == len(labs())
    assert "can't be read" in lab("diff", "radix", ".").err
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / ".minisgl-lab").write_text("")
    said = lab("hint", "radix", "--dir", str(busy))
    assert said.status == 2 and "state.json can't be written" in said.err
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["list"], ["status"], ["start", "radix"], ["test", "radix"], ["hint", "radix"], ["diff", "radix"]):
        said = lab(*words)
        assert said.status == 2 and "The current folder does not exist any more" in said.err, words


def test_invalid_description(tmp_path: Path) -> None:
    """A description with an unknown key, or with the text of a common cause, is refused."""
    path = tmp_path / "odd.toml"
    path.write_text('title = "A"\nsays = "B"\nhok = "cache"\n')
    with pytest.raises(ValueError, match="hok"):
        read(path, "00")
    path.write_text('title = "A"\nsays = "B"\n[causes]\nhangs = "C"\n')
    with pytest.raises(ValueError, match="hangs"):
        read(path, "00")


def test_history_names_the_offered_pages() -> None:
    """The calls of a failing cache say which pages were offered."""
    cache = make_plugin("cache", "radix", page_size=1, compare="numpy")
    cache.evict = lambda pages: np.empty(0, np.int32)
    with pytest.raises(Broken) as wrong:
        History(cache, 1, "match").run([["insert", [5, 6]], ["insert", [5, 7]], ["evict", 1]])
    assert wrong.value.cause == "evict-few"
    assert wrong.value.show.splitlines()[1:] == [
        "1. insert [5 | 6] as pages 0 1",
        "2. insert [5 | 7] as pages 2 3",
        "3. evict 1",
    ]


def test_shown_step() -> None:
    """A step says how many pages each waiting request needs."""
    step = {"answers": [], "begun": [], "waiting": [[1, 1], [0, 17]], "slots": 1, "pages": 0, "chunk": 1}
    assert show_plan({**step, "order": "fcfs", "priced": 1}).splitlines()[1:] == [
        "request 1: waits, 1 prompt token cached, 1 to compute, needs 1 new page",
        "request 2: waits, 0 prompt tokens cached, 17 to compute, needs 2 new pages",
    ]
    assert "one step of 1 token," in show_plan({**step, "order": "fcfs"})
    assert "1 to compute, needs no new page" in show_plan({**step, "order": "fcfs"})


def test_gate_names() -> None:
    """The names of a lab's gates are unique."""
    for one in labs():
        names = [gate.name for gate in one.gates]
        assert "loads" not in names and len(set(names)) == len(names), one.lab
        assert all(isinstance(gate, Gate) for gate in one.gates)


@pytest.mark.parametrize("name", ["paged", "replay", "ring", "experts"])
def test_shipped_plugins_are_forbidden(name: str) -> None:
    """A student's file may not import any shipped plugin of the lab's hook that runs on a CPU."""
    import minisgl.plugins as plugins

    lab = find(name)
    [folder] = plugins.__path__
    shipped = {f"minisgl.plugins.{lab.hook}.{file.stem}" for file in Path(folder, str(lab.hook)).glob("[a-z]*.py")}
    gpu_only = {f"minisgl.plugins.attention.{gpu}" for gpu in ("flash_attn", "flashinfer", "trtllm")}
    gpu_only.add("minisgl.plugins.communicator.shared")
    without_code = {f"minisgl.plugins.{lab.hook}.{other}" for other in ("auto", "none")}  # compute nothing themselves
    without_code.add("minisgl.plugins.communicator.group")  # the base class that a student's communicator derives
    assert shipped - gpu_only - without_code <= set(lab.forbidden)


def test_missing_client(lab: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the openai client, the server gate does not run and the other verdicts stay. Two gates show that."""

    class Unasked:
        def __init__(self, *args: object) -> None: ...
        def __enter__(self) -> Unasked:
            return self

        def __exit__(self, *args: object) -> None: ...
        def run(self, gate: Gate) -> str:
            raise Missing("no client: pip install openai")

    monkeypatch.setattr(POLICY.module, "GATES", [each for each in POLICY.gates if each.name in ("promises", "server")])
    monkeypatch.setattr(POLICY.module, "SERVED", Unasked, raising=False)
    (tmp_path / POLICY.file).write_text(solution(POLICY), "utf-8")
    said = lab("test", "policy")
    assert said.status == 1
    assert "no client: pip install openai  (not tried)" in said.out
    assert "2 of 3 gates green." in said.out
    assert "2 of 3 gates green, next: server" in lab("status").out


def test_documented_installations() -> None:
    """The documented install commands include the extra `lab`."""
    root = Path(__file__).parents[3]
    for page, line in {
        "Makefile": "$(SHOWN) -e '.[lab]'",
        "README.md": "pip install -c constraints.txt -e '.[lab]'",
        "chapters/00_start/index.md": "pip install -c constraints.txt -e '.[lab]'",
    }.items():
        assert line in (root / page).read_text("utf-8"), page


def test_circle_of_causes_ends(tmp_path: Path) -> None:
    """An exception whose causes form a circle gets a verdict; the diagnosis followed the chain forever."""
    student = Student(POLICY, tmp_path / "my_policy.py")
    first, second = AssertionError("a sum is wrong"), ValueError("why")
    first.__cause__, second.__cause__ = second, first
    assert diagnose(student, first).cause == "promise"
    assert list(causes_of(first)) == [first, second]


def test_needed_gate_stops_the_gate_that_needs_it(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong index makes right copies wrong: they are not blamed. An index to be written stops nothing."""
    monkeypatch.setattr(fork_server, "search_share", 0.1)
    lab = find("draft")
    right = solution(lab)
    wrong = right.replace("= len(self.tokens)\n", "= len(self.tokens) - 1\n")
    unwritten = right.replace(
        "    def append(", "    def append(self, tokens):\n        raise NotImplementedError\n\n    def old("
    )
    assert wrong != right != unwritten
    tried = []
    for text in (wrong, unwritten):
        (tmp_path / lab.file).write_text(text)
        report = grade(lab, tmp_path / lab.file, seed=1, serve=False, fork_server=fork_server)
        tried.append([verdict.gate for verdict in report.verdicts if verdict.tried])
    assert tried == [["loads", "index"], ["loads", "index", "copy", "turn"]]


def test_command_is_not_cut() -> None:
    """The command that reproduces a failure is printed whole, however long its paths are."""
    again = "python -m minisgl.lab test paged --dir " + "/a long path" * 20
    red = Verdict("gather", "says", cause="pages", promise="p", seen="s")
    assert red.explain(find("paged"), again)[-1].endswith(again)


# ---- the grader tells the truth -------------------------------------------------------------------------------


def test_state_between_workloads_is_named(tmp_path: Path) -> None:
    """A failure that a new process does not show is no failure of the shown workload, and the command repeats it."""
    body = "        global COUNT\n        COUNT += 1\n        if COUNT > 150:\n            return Plan([])\n"
    signature = "budget: Budget) -> Plan:\n"
    path = tmp_path / "my_policy.py"
    path.write_text(solution(POLICY).replace(signature, signature + body) + "\n\nCOUNT = 0\n")
    assert body in path.read_text()
    report = grade(POLICY, path, seed=1, only=["plan"], confirm=True)
    (verdict,) = report.verdicts
    assert verdict.cause == "earlier" and verdict.workload is None, verdict.explain(POLICY, "")
    assert "In a new process, this workload alone is right." in verdict.seen


def test_failure_of_the_workload_stays(tmp_path: Path) -> None:
    (verdict,) = grade(POLICY, policy(tmp_path, "return Plan(rows=[])"), seed=1, only=["plan"], confirm=True).verdicts
    assert verdict.cause == "empty" and verdict.workload is not None


def test_no_step_before_the_first(tmp_path: Path) -> None:
    verdict = Verdict("steps", "says").fail(Broken("promise", "P.", "S.", step=-1, page=3))
    text = "\n".join(verdict.explain(POLICY, ""))
    assert "step -1" not in text and "Where:   before the first step, page 3" in text


def test_code_without_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated code may have no line number."""
    path = tmp_path / "my_policy.py"
    frame = traceback.FrameSummary(str(path), 1, "plan", lookup_line=False, line="")
    frame.lineno = None  # type: ignore[assignment]
    monkeypatch.setattr(traceback, "extract_tb", lambda trace: [frame])
    seen = diagnose(Student(POLICY, path), RuntimeError("wrong")).seen
    assert "None" not in seen and "in my_policy.py, in plan" in seen


def test_limit_of_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processor time grows as much as a calibration run takes longer."""
    monkeypatch.setattr(search_module, "slowness", lambda: 50.0)
    with alarm(0.05, 100.0, 100.0):
        compute_cpu(0.4)
    monkeypatch.setattr(search_module, "slowness", lambda: 1.0)
    with pytest.raises(TimedOut, match="s of processor time for one workload"), alarm(0.05, 100.0, 100.0):
        compute_cpu(10.0)
    with pytest.raises(TimedOut, match="It waited: in the last"), alarm(100.0, 0.5, 100.0):
        time.sleep(30)


def compute_cpu(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


class StartingServer:
    """A server that is never ready."""

    def __init__(self, ended: int | None = None, log: Sequence[str] = ("loading",)):
        self.process, self.logs, self.ended = self, deque(log), ended
        self.pid = 0

    def poll(self) -> int | None:
        return self.ended

    def log(self) -> str:
        return self.logs.popleft() if len(self.logs) > 1 else self.logs[0]

    def wait_until_ready(self, timeout: float) -> None:
        raise RuntimeError("not ready")


def test_start_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no verdict: a server that computes too much or nothing is one."""
    used = iter([[float(i), 0.1] for i in range(10**6)])
    clock = iter(range(0, 10**8, 5))
    monkeypatch.setattr(server_gate, "slowness", lambda: 1.0)
    monkeypatch.setattr(server_gate, "scaled_timeout", lambda seconds: seconds)
    monkeypatch.setattr(server_gate.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(server_gate, "processor_seconds", lambda pid: next(used))
    assert server_gate.wait_for_start(StartingServer(ended=1)) == "dies"
    assert server_gate.wait_for_start(StartingServer()) == "hangs"  # 46 s of processor time
    monkeypatch.setattr(server_gate, "processor_seconds", lambda pid: [1.0])
    assert server_gate.wait_for_start(StartingServer()) == "hangs"  # it computes nothing
    slow = iter(range(10**6))
    monkeypatch.setattr(server_gate, "processor_seconds", lambda pid: [0.13 * next(slow), 0.0])
    monkeypatch.setattr(server_gate, "slowness", lambda: 40.0)
    assert server_gate.wait_for_start(StartingServer()) == "slow"
    turns = iter(range(10**6))  # a compiler ends, with its processor time, and the server works on
    monkeypatch.setattr(
        server_gate, "processor_seconds", lambda pid: [1.0, 300.0] if (n := next(turns)) < 3 else [0.13 * n]
    )
    assert server_gate.wait_for_start(StartingServer()) == "slow"


def test_one_rank_is_no_plural() -> None:
    workload = {"ranks": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 4, "inner": 3, "tokens": 9, "layers": 2}
    assert show_shape(workload).startswith("1 rank, ")


def test_the_deciding_numbers_of_a_step_are_shown() -> None:
    """What a verdict may depend on is in the description of the step."""
    step = {"order": "fcfs", "chunk": 8, "slots": 2, "pages": 9, "reserved": 0, "growth": 2, "priced": 1,
            "answers": [], "begun": [], "waiting": [[0, 5]], "waited": [7]}  # fmt: skip
    text = show_plan(step)
    assert "reserves for later: 2" in text and "left out of 7 steps" in text


def test_dead_end_without_rule() -> None:
    """A text that a network reads without ever getting to an end is a dead end, and not a wrong return of a rule."""
    a, nothing = ["text", 97], ["any"]
    dead = Loose(network(["any", ["seq", a, nothing], ["seq"]], []))
    assert dead.reaches(b"a") and not dead.reaches(b"b")
    twice = Loose(network(["seq", ["rule", 0], ["rule", 0]], [a]))
    assert twice.reaches(b"aa") and not twice.reaches(b"aaa") and twice.begins(b"aaa")


def test_gate_after_the_server() -> None:
    """A gate that reads what the server has counted runs with the gate that asks it questions."""
    gates = find("meter").gates
    assert with_server_gates(gates, ["metrics"]) == {"server", "metrics"}
    assert with_server_gates(gates, ["clock"]) == {"clock"}
