"""What no lab can do to its grader: hang it, die in it, leave processes behind, borrow the reference, or be graded by
nothing. And what a verdict looks like.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from minisgl.course.lab.catalog import Lab, find, labs, read
from minisgl.course.lab.cli import main
from minisgl.course.lab.gates.policy import show_plan
from minisgl.course.lab.grader import grade as grader
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Missing, Student
from minisgl.course.lab.grader.gate_process import LOADS
from minisgl.course.lab.grader.grade import Nursery, grade
from minisgl.course.lab.grader.search import alarm, search
from minisgl.course.lab.grader.server_gate import Served, _check_called
from minisgl.course.lab.grader.shrink import smallest
from minisgl.course.lab.skeletons import solution
from minisgl.course.lab.verdicts import LINES, Verdict
from minisgl.testing.serving import patience

POLICY = find("policy")
PLAN = POLICY.gates[0]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


def policy(tmp_path: Path, plan: str, top: str = "") -> Path:
    """A policy whose ``plan`` is this code, with this code before it."""
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

class Policy:
    def plan(self, waiting, running, budget):
{body}

@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine

@hookimpl
def minisgl_scheduler(config):
    return Policy() if isinstance(config, Mine) else None
''')
    return path


def try_plan(nursery: Nursery, path: Path, limit: float = 10.0) -> Verdict:
    return nursery.run(POLICY, path, dataclasses.replace(PLAN, limit=limit), seed=1)


# ---- a named verdict in time, and no process left ------------------------------------------------------


def test_an_endless_loop_is_named_with_the_workload_in_ten_seconds(nursery: Nursery, tmp_path: Path) -> None:
    begun = time.monotonic()
    verdict = try_plan(nursery, policy(tmp_path, "while True: pass"))
    assert time.monotonic() - begun < patience(10)
    assert (verdict.cause, verdict.green) == ("hangs", False)
    assert "in plan: while True: pass" in verdict.seen
    assert verdict.workload["jobs"] and "request" in verdict.show


def test_a_deadlock_is_named_in_ten_seconds(nursery: Nursery, tmp_path: Path) -> None:
    top = "import threading\nlock = threading.Lock()"
    begun = time.monotonic()
    verdict = try_plan(nursery, policy(tmp_path, "lock.acquire()\nlock.acquire()", top))
    assert time.monotonic() - begun < patience(10)
    assert verdict.cause == "hangs"


def test_an_empty_plan_is_named(nursery: Nursery, tmp_path: Path) -> None:
    verdict = try_plan(nursery, policy(tmp_path, "return Plan([])"))
    assert verdict.cause == "empty"
    assert len(verdict.workload["jobs"]) == 1, "the smallest workload has one request"


def test_what_swallows_every_exception_is_killed_by_the_watchdog(nursery: Nursery, tmp_path: Path) -> None:
    loop = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    begun = time.monotonic()
    verdict = try_plan(nursery, policy(tmp_path, loop), limit=2.0)
    assert time.monotonic() - begun < patience(5)
    assert verdict.cause == "hangs"
    assert verdict.workload["jobs"], "the workload it was busy with"


def test_a_file_that_hangs_when_imported_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    path = policy(tmp_path, "return Plan([])", "import time\ntime.sleep(100)")
    assert nursery.run(POLICY, path, dataclasses.replace(LOADS, limit=1.0), seed=1).cause == "hangs"


@pytest.mark.parametrize("how", ["import os\nos._exit(3)", "import ctypes\nctypes.string_at(0)"])
def test_a_process_that_dies_is_named(nursery: Nursery, tmp_path: Path, how: str) -> None:
    verdict = try_plan(nursery, policy(tmp_path, how))
    assert verdict.cause == "dies"
    assert verdict.show == show_plan(verdict.workload), "in words, as for any other verdict"


@pytest.mark.parametrize("top", ["", "raise SystemExit(0)"])
def test_a_file_that_exits_ends_its_gate_and_is_named(nursery: Nursery, tmp_path: Path, top: str) -> None:
    verdict = try_plan(nursery, policy(tmp_path, "raise SystemExit(0)", top))
    assert verdict.cause == "raises" and "SystemExit" in verdict.seen


def test_memory_without_end_is_named(nursery: Nursery, tmp_path: Path) -> None:
    verdict = try_plan(nursery, policy(tmp_path, "bytearray(1 << 36)"))
    assert verdict.cause == "memory"


def test_no_process_is_left_behind_whatever_it_started(nursery: Nursery, tmp_path: Path) -> None:
    start = "subprocess.Popen(['sleep', '1919.25'], start_new_session=True)\nreturn Plan([])"
    try_plan(nursery, policy(tmp_path, start, "import subprocess"))
    left = [p for p in psutil.process_iter(["cmdline"]) if "1919.25" in (p.info["cmdline"] or ())]
    assert left == []


def test_a_grader_that_is_killed_takes_its_gates_with_it(tmp_path: Path) -> None:
    path = policy(tmp_path, "return Plan([])", "import time\ntime.sleep(100)")
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.lab", "test", "policy", str(path), "--dir", str(tmp_path)]
    )
    below: list[psutil.Process] = []
    until = time.monotonic() + 20
    while len(below) < 2 and time.monotonic() < until:
        below = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    assert len(below) == 2, "the process that forks, and the gate"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert alive == []


# ---- what is not a solution -----------------------------------------------------------------------------


NOT_PLUGINS = {
    "it does not import": ("import no_such_package\n", "no_such_package"),
    "it is not Python": ("def plan(:\n", "line 1 is not Python"),
    "it has no hook": ("x = 1\n", "has no hook"),
    "its hook lacks the mark": ("def minisgl_scheduler(config):\n    return None\n", "no @hookimpl"),
    "it is for another hook": ("from minisgl import hookimpl\n@hookimpl\ndef minisgl_metrics():\n    return ''\n",
                               "no @hookimpl minisgl_scheduler"),
    "its name is another": ("""
from dataclasses import dataclass
from minisgl import hookimpl
@dataclass
class Other:
    pass
@hookimpl
def minisgl_configs():
    yield "scheduler", "other", Other
@hookimpl
def minisgl_scheduler(config):
    return None
""", "not 'mine'"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_PLUGINS)
def test_a_file_without_the_plugin_fails_at_the_first_gate(nursery: Nursery, tmp_path: Path, what: str) -> None:
    text, seen = NOT_PLUGINS[what]
    path = tmp_path / "my_policy.py"
    path.write_text(text)
    report = grade(POLICY, path, nursery=nursery)
    first, *others = report.verdicts
    assert first.cause == "loads" and seen in first.seen
    assert not any(verdict.tried for verdict in others) and not report.passed


def test_a_hook_that_builds_nothing_fails(nursery: Nursery, tmp_path: Path) -> None:
    path = policy(tmp_path, "return Plan([])")
    path.write_text(path.read_text().replace("return Policy() if", "return None if"))
    verdict = try_plan(nursery, path)
    assert verdict.cause == "loads" and "No plugin builds scheduler=mine" in verdict.seen


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
def test_the_reference_is_refused_and_named(nursery: Nursery, tmp_path: Path, top: str, plan: str) -> None:
    verdict = try_plan(nursery, policy(tmp_path, plan, top))
    assert verdict.cause == "reference"
    assert MIXED in verdict.seen


def test_a_lab_without_gates_grades_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = policy(tmp_path, "return Plan([])")
    monkeypatch.setattr(Lab, "gates", ())
    with pytest.raises(RuntimeError, match="no gates"):
        grade(POLICY, path)


def test_a_report_without_gates_or_with_one_left_out_never_passes() -> None:
    report = grader.Report(POLICY, "", "", 0)
    assert not report.passed
    report.verdicts = [Verdict("plan", ""), Verdict("server", "", tried=False)]
    assert not report.passed
    report.verdicts.pop()
    assert report.passed


class Scraped:
    """A server's ``/metrics``."""

    def __init__(self, **samples: float):
        self.samples = samples

    def metrics(self) -> dict[str, float]:
        return self.samples


def served(path: Path, calls: dict[str, float], sha256: str = "abc") -> Served:
    one = Served(POLICY, path, "abc")
    label = f'path="{path}",plugin="my_policy",process="scheduler-0",sha256="{sha256}"'
    one.server = Scraped(  # type: ignore[assignment]
        **{f'minisgl_plugin_calls_total{{call="{call}",{label}}}': times for call, times in calls.items()}
    )
    return one


def test_a_server_that_never_calls_the_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.course.lab.grader.server_gate.patience", lambda seconds: 0.0)
    path = tmp_path / "my_policy.py"
    assert _check_called(served(path, {"plan": 3.0}), ["plan"], "scheduler-0") == {"plan": 3.0}
    for one in (
        served(path, {"minisgl_scheduler": 1.0}),
        served(path, {"plan": 0.0}),
        served(path, {"plan": 3.0}, "another file's"),
        served(tmp_path / "elsewhere.py", {}),
    ):
        with pytest.raises(Broken) as caught:
            _check_called(one, ["plan"], "scheduler-0")
        assert caught.value.cause == "never-called"


# ---- searching and shrinking -----------------------------------------------------------------------------


def test_the_smallest_workload_is_found_again_and_again() -> None:
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
    return Student(POLICY, Path("my_policy.py"), seed=3)


def test_a_search_starts_small_keeps_the_cause_and_skips_what_makes_no_sense() -> None:
    def run(student: Student, workload: dict[str, int]) -> None:
        if workload["n"] < 2:
            raise Invalid
        if workload["n"] < 5:
            raise Broken("other", "Small ones work.", "One did not.")
        if workload["n"] > 7:
            raise Broken("large", "Large ones work.", "One did not.", step=workload["n"])

    with pytest.raises(Broken) as caught:
        search(lambda rng, size: {"n": 5 + size}, run)(student())
    assert (caught.value.cause, caught.value.workload, caught.value.step) == ("large", {"n": 8}, 8)
    assert search(lambda rng, size: {"n": 6}, run, tries=9)(student()) == "9 workloads"


def test_the_same_seed_tries_the_same_workloads_and_another_gate_others() -> None:
    tried: list[Any] = []
    whole = search(lambda rng, size: rng.random(), lambda student, workload: tried.append(workload), tries=3)
    first, again, other = student(), student(), dataclasses.replace(student(), gate="other")
    for one in (first, again, other):
        whole(one)
    assert tried[:3] == tried[3:6] != tried[6:]


def test_a_replay_tries_the_given_workload_alone() -> None:
    tried: list[Any] = []
    whole = search(lambda rng, size: size, lambda student, workload: tried.append(workload))
    one = student()
    one.replay = 77
    whole(one)
    assert tried == [77]


def test_an_alarm_is_off_when_its_block_ends() -> None:
    with alarm(0.05, 0.05):
        pass
    time.sleep(0.2)


def test_a_verdict_is_at_most_fifteen_lines() -> None:
    verdict = Verdict("plan", "says").blame(
        Broken(
            "skips", "word " * 200, "seen " * 300, step=3, request=4, page=5, workload={}, show="line of text\n" * 60
        )
    )
    lines = verdict.explain(POLICY, "python -m minisgl.lab test policy --replay here.json")
    assert len(lines) == LINES
    text = "\n".join(lines)
    assert "step 3, request 4, page 5" in text and "--replay here.json" in text and "lines more" in text
    assert POLICY.causes["skips"][:40] in text
    assert all(len(line) < 130 for line in lines)


# ---- the command -------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command, in the folder of a student."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        try:
            status = main(words)
        except SystemExit as error:
            status = error.code  # type: ignore[assignment]
        return Said(status, *capfd.readouterr())

    return run


def test_a_first_hour_with_the_command(lab: Callable[..., Said], tmp_path: Path) -> None:
    said = lab("start", "radix")
    assert said.status == 0 and "my_radix.py" in said.out and "radix.match" in said.out
    again = lab("start", "radix")
    assert again.status == 2 and "is there already" in again.err
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


def test_a_failure_is_replayed_from_the_line_that_it_prints(lab: Callable[..., Said], tmp_path: Path) -> None:
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
    path.write_text(path.read_text() + "\n")
    assert "the file has changed since" in lab("status").out


def test_wrong_words_are_answered_for_people(lab: Callable[..., Said]) -> None:
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


def test_a_folder_that_is_gone_or_can_not_be_written_is_answered_for_people(
    lab: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert said.status == 2 and "The folder that you are in is gone" in said.err, words


def test_a_description_that_can_not_be_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('title = "A"\nsays = "B"\nhok = "cache"\n')
    with pytest.raises(ValueError, match="hok"):
        read(path, "00")
    path.write_text('title = "A"\nsays = "B"\n[causes]\nhangs = "C"\n')
    with pytest.raises(ValueError, match="hangs"):
        read(path, "00")


def test_gates_are_given_their_names_once() -> None:
    for one in labs():
        names = [gate.name for gate in one.gates]
        assert "loads" not in names and len(set(names)) == len(names), one.lab
        assert all(isinstance(gate, Gate) for gate in one.gates)


@pytest.mark.parametrize("name", ["paged", "replay", "ring", "experts"])
def test_what_ships_for_the_labs_hook_is_not_the_students_own_work(name: str) -> None:
    """A backend that ships computes what the lab asks for, so none that runs here may be taken instead."""
    import minisgl.plugins as plugins

    lab = find(name)
    [folder] = plugins.__path__
    shipped = {f"minisgl.plugins.{lab.hook}.{file.stem}" for file in Path(folder, str(lab.hook)).glob("[a-z]*.py")}
    elsewhere = {f"minisgl.plugins.attention.{gpu}" for gpu in ("flash_attn", "flashinfer", "trtllm")}
    nothing = {f"minisgl.plugins.{lab.hook}.{other}" for other in ("auto", "none")}  # do none of it themselves
    assert shipped - elsewhere - nothing <= set(lab.forbidden)


def test_what_is_missing_to_ask_the_server_costs_no_gate_that_was_tried(
    lab: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unasked:
        def __init__(self, *args: object) -> None: ...
        def __enter__(self) -> Unasked:
            return self

        def __exit__(self, *args: object) -> None: ...
        def run(self, gate: Gate) -> str:
            raise Missing("no client: pip install openai")

    monkeypatch.setattr(POLICY.module, "SERVED", Unasked, raising=False)
    (tmp_path / POLICY.file).write_text(solution(POLICY), "utf-8")
    said = lab("test", "policy")
    assert said.status == 1
    assert "no client: pip install openai  (not tried)" in said.out
    assert "6 of 7 gates green." in said.out
    assert "6 of 7 gates green, next: server" in lab("status").out


def test_the_installations_that_the_pages_show_have_what_labs_ask_with() -> None:
    root = Path(__file__).parents[3]
    for page, line in {
        "Makefile": "$(PIP) -e '.[lab]'",
        "README.md": "pip install -c constraints.txt -e '.[lab]'",
        "chapters/00_start/index.md": "pip install -c constraints.txt -e '.[lab]'",
    }.items():
        assert line in (root / page).read_text("utf-8"), page
