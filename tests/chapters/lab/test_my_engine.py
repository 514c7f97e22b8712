"""A student's own engine: which files count, the server with all of them, the ladder, random schedules and the card."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from minisgl.chapters.lab.arena import play
from minisgl.chapters.lab.catalog import Lab, find, labs
from minisgl.chapters.lab.child import ChildError, ask_child
from minisgl.chapters.lab.cli import main
from minisgl.chapters.lab.folder import Folder
from minisgl.chapters.lab.grader.grade import fingerprint
from minisgl.chapters.lab.mine.commands import gates_line
from minisgl.chapters.lab.mine.drawing import draw_text, lines_of
from minisgl.chapters.lab.mine.engine import own_parts, parts_of
from minisgl.chapters.lab.mine.rungs import changes, measure, rungs_of
from minisgl.chapters.lab.mine.schedules import CHECKED, run_schedules
from minisgl.chapters.lab.skeletons import skeleton, solution
from minisgl.chapters.lab.verdicts import Report, Verdict
from minisgl.testing.serving import Server, scaled_timeout

from .test_solutions import write


def finish(folder: Path, names: Sequence[str], text: str | None = None) -> Folder:
    """Write the solutions of labs into a folder, and save a report with all gates green for each."""
    state = Folder(folder)
    for name in names:
        lab = find(name)
        path = folder / lab.file
        path.write_text(text or solution(lab))
        verdicts = [Verdict(gate, "") for gate in lab.gate_names]
        state.remember_report(Report(lab, str(path.resolve()), fingerprint(path), 1, verdicts), lab.gate_names)
    return state


def with_solutions() -> list[str]:
    """Return the names of the labs with one file."""
    return [lab.lab for lab in labs() if lab.plugin]


# ---- what is finished ------------------------------------------------------------------------------------


def test_gates_that_run_alone_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``test --gate`` adds to the saved result, and a change of the file opens the lab again."""
    path = tmp_path / "my_policy.py"
    path.write_text(solution(find("policy")))
    where = ["--dir", str(tmp_path)]
    assert main(["test", "policy", *where, "--gate", "loads", "--seed", "1"]) == 0
    assert main(["test", "policy", *where, "--gate", "counts", "--seed", "1"]) == 0
    capsys.readouterr()
    main(["status", *where])
    assert re.search(r"policy .* 2 of 7 gates green, next: plan", capsys.readouterr().out)
    path.write_text(path.read_text() + "\n# a change\n")
    main(["status", *where])
    assert "open again: the file has changed since 2 of 7 gates were green" in capsys.readouterr().out
    main(["test", "policy", *where, "--gate", "loads", "--seed", "1"])
    capsys.readouterr()
    main(["status", *where])
    assert "1 of 7 gates green, next: plan" in capsys.readouterr().out


def test_only_the_number_to_beat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``test --beat`` runs no gate, says so and names its seed, and its result is kept for the card."""
    path = tmp_path / "my_policy.py"
    path.write_text(solution(find("policy")))
    assert main(["test", "policy", "--dir", str(tmp_path), "--beat", "--seed", "1"]) == 0
    measured, graded = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Yours: worst gap \d+ tokens in \d+ steps; .*: not beaten yet\. Seed 1\.", measured)
    counts = "A number counts as beaten only with green gates: python -m minisgl.lab test policy"
    assert graded == f"The gates are not graded for the file as it is now. {counts}"
    assert Folder(tmp_path).recall()["policy"]["stretch"]["beaten"] is False
    lab, wrong = find("policy"), Verdict("counts", "", cause="order")
    report = Report(lab, str(path), fingerprint(path), 1)
    report.verdicts.append(wrong)
    Folder(tmp_path).remember_report(report, lab.gate_names)
    assert gates_line(Folder(tmp_path), lab, path) == f"Red for this file: gate counts. {counts}\n"
    report.verdicts = [Verdict("counts", "")]
    Folder(tmp_path).remember_report(report, lab.gate_names)
    assert gates_line(Folder(tmp_path), lab, path).startswith("1 of 7 gates are green for the file as it is now, and ")
    monkeypatch.setattr(Lab, "stretch", None)
    with pytest.raises(SystemExit) as refused:
        main(["test", "policy", "--dir", str(tmp_path), "--beat"])
    assert refused.value.code == 2
    assert "no number to beat" in capsys.readouterr().err


def test_a_red_gate_replaces_a_green_one(tmp_path: Path) -> None:
    folder, lab = finish(tmp_path, ["policy"]), find("policy")
    report = Report(lab, str(tmp_path / lab.file), fingerprint(tmp_path / lab.file), 1)
    report.verdicts.append(Verdict("counts", "", cause="order"))
    folder.remember_report(report, lab.gate_names)
    (part,) = (part for part in own_parts(folder) if part.lab.lab == "policy")
    assert (part.green, part.total, part.red, part.finished) == (6, 7, "counts", False)


def test_the_drawing_marks_what_is_own(tmp_path: Path) -> None:
    folder = finish(tmp_path, ["policy", "radix", "ring"])
    (tmp_path / "my_paged.py").write_text(skeleton(find("paged")))
    radix = tmp_path / "my_radix.py"
    radix.write_text(radix.read_text() + "# later\n")
    states = {line.name: line.state for line in lines_of(own_parts(folder))}
    assert {name for name, state in states.items() if state == "own"} == {"policy", "all-reduce"}
    assert {name for name, state in states.items() if state == "begun"} == {"prefix cache", "attention"}
    text = draw_text(own_parts(folder), plain=True)
    assert text.isascii() and "* policy           my_policy.py" in text and "my_radix.py: changed, open again" in text
    coloured = draw_text(own_parts(folder), colour=True)
    assert "\x1b[1;32m■ policy" in coloured and "\x1b[2m□ experts" in coloured


# ---- the server ------------------------------------------------------------------------------------------


def test_all_finished_parts_that_go_together(tmp_path: Path) -> None:
    parts = own_parts(finish(tmp_path, with_solutions()))
    engine = parts_of(parts)
    left = {part.lab.lab: reason for part, reason in engine.left_out}
    assert left.keys() == {"policy", "experts", "window", "fuse", "replay"}
    assert (
        "slo" in left["policy"]
        and "kernels=mine" in left["fuse"]
        and "model=tutor-moe" in left["experts"]
        and "no windows" in left["window"]
        and "--without paged" in left["replay"]  # it would record no graph, and say nothing
    )
    assert {"scheduler=mine", "cache=mine", "architecture=Mine", "tp=2"} <= set(engine.words)
    assert engine.words[0].count(".py") == len(with_solutions()) - 5
    for graphs in (parts_of(parts, [], ["paged"]), parts_of(parts, ["attention=auto"])):
        assert "graph=mine" in graphs.words and "attention=mine" not in graphs.words

    experts = parts_of(parts, ["model=tutor-moe"], ["slo"])
    assert {part.lab.lab for part, _ in experts.left_out} == {"shard", "slo", "int8", "window", "fuse", "replay"}
    assert {"moe=mine", "model=tutor-moe"} <= set(experts.words) and "architecture=Mine" not in experts.words

    own = parts_of(parts, ["cache=radix", "tp=1", "plugins=other.py", "kernels=mine"])
    assert {part.lab.lab for part, _ in own.left_out} == {"policy", "experts", "radix", "ring", "window", "replay"}
    assert "cache=mine" not in own.words and "tp=2" not in own.words and own.words[0].endswith(",other.py]")


def test_a_model_with_windows_has_the_cache_of_lab_window(tmp_path: Path) -> None:
    """Both labs write a cache. The drawing has a line for each."""
    parts = own_parts(finish(tmp_path, ["radix", "window"]))
    other = parts_of(parts, ["model=/models/gemma"])
    assert [part.lab.lab for part in other.used] == ["window"] and "lab window" in other.left_out[0][1]
    assert [part.lab.lab for part in parts_of(parts).used] == ["radix"]
    assert {line.name for line in lines_of(parts) if line.state == "own"} == {"prefix cache", "pages of windows"}


def test_the_package_of_the_capstone(tmp_path: Path) -> None:
    """A package is not installed for the server: its module is found by the path."""
    folder, lab = Folder(tmp_path), find("capstone")
    for path in folder.start(lab):
        assert path.exists()
    path = tmp_path / lab.file
    verdicts = [Verdict(gate, "") for gate in lab.gate_names]
    folder.remember_report(Report(lab, str(path), fingerprint(path), 1, verdicts), lab.gate_names)
    engine = parts_of(own_parts(folder))
    assert engine.words == ["plugins=[my_capstone]"] and engine.python_path == [str(path / "src")]


def test_serve_runs_the_real_server(tmp_path: Path) -> None:
    """Each own part is called. The options of the server follow. The same file plays in the arena."""
    names = ["meter", "ledger", "policy", "radix"]
    finish(tmp_path, names)
    script = tmp_path / "serve.py"  # it gets the words of `Server`: -m minisgl device=cpu …
    script.write_text(
        "import sys\nfrom minisgl.chapters.lab.cli import main\n"
        f"main(['serve', '--dir', {str(tmp_path)!r}, *sys.argv[3:]])\n"
    )
    limit = scaled_timeout(180)
    with Server("model=tutor", "num_pages=512", python=[sys.executable, str(script)], timeout=limit) as server:
        import urllib.request

        body = {"model": "tutor", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=limit) as response:
            assert "4" in json.load(response)["choices"][0]["message"]["content"]
        until = time.monotonic() + limit  # the processes report their counts four times a second
        while missing := [name for name in names if not any(f"/my_{name}.py" in each for each in server.metrics())]:
            assert time.monotonic() < until, f"never called: {missing}"
            time.sleep(0.1)
    played = play.answer({"kind": "cache", "entry": str(tmp_path / "my_radix.py"), "file": True, "seed": 1})
    assert all(each.computed > 0 for each in played)


# ---- the ladder, the schedules, the card -----------------------------------------------------------------


def test_the_ladder_counts_the_own_engine(tmp_path: Path) -> None:
    parts = own_parts(finish(tmp_path, ["policy", "radix"]))
    plain, policy, both = measure(rungs_of(parts))
    assert (plain["computed"], plain["worst_gap"]) == (20_034, 5_196)  # of stage 4
    assert policy["worst_gap"] == 128 and policy["computed"] == 20_034
    assert (both["computed"], both["worst_gap"]) == (5_058, 128)  # as of stage 6
    assert "worst gap 5,196 → 128" in changes(plain, policy)


def test_a_rung_that_fails_says_why(tmp_path: Path) -> None:
    text = solution(find("policy")).replace('order: str = "fcfs"', 'order: str = "fcfs"\n    x: int = 1 // 0')
    plain, own = measure(rungs_of(own_parts(finish(tmp_path, ["policy"], text))))
    assert "error" not in plain and "ZeroDivisionError" in own["error"]


def test_promises_under_random_schedules(tmp_path: Path) -> None:
    said: list[str] = []
    parts = own_parts(finish(tmp_path, ["meter", "ledger", "policy", "radix", "draft"]))
    held = run_schedules(parts, 40, 7, say=said.append)
    assert held.held and held.runs == 40, held.text
    assert re.match(r"40 schedules take about \d+ s more", said[0])


STAYS = """
import atexit, pathlib, subprocess, sys, time

if "minisgl.chapters.lab.mine.schedules" in " ".join(sys.orig_argv):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(__file__).with_suffix(".pid").write_text(str(child.pid))
    atexit.register(time.sleep, 600)
"""


def test_a_process_that_never_ends(tmp_path: Path) -> None:
    """The last schedule decides, and no process of the student's code is left."""
    lab = find("policy")
    parts = own_parts(finish(tmp_path, ["policy"], solution(lab) + STAYS))
    held = run_schedules(parts, 2, 7, say=lambda text: None)
    assert held.held and held.runs == 2, held.text
    assert ended(int((tmp_path / lab.file).with_suffix(".pid").read_text()))


def ended(pid: int) -> bool:
    """Return whether a process ends within some seconds. A process that its parent does not reap has ended, too."""
    until = time.monotonic() + scaled_timeout(20)
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_child_ends_with_its_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a child starts keep no answer waiting, and end with it."""
    (tmp_path / "family.py").write_text(
        "import json, subprocess, sys, time\n"
        "request = json.load(sys.stdin)\n"
        "own = {'start_new_session': True} if request['stay'] else {}\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], **own)\n"
        "open(request['pid'], 'w').write(str(child.pid))\n"
        "print(json.dumps({'answer': 1}), flush=True)\n"
        "time.sleep(600 if request['stay'] else 0)\n"
    )
    pid, env = tmp_path / "pid", {"PYTHONPATH": str(tmp_path)}
    assert ask_child("family", {"pid": str(pid), "stay": False}, scaled_timeout(60), env) == {"answer": 1}
    assert ended(int(pid.read_text()))
    pid.unlink()
    real = subprocess.Popen.wait

    def wait_for_the_family(self: subprocess.Popen[str], timeout: float | None = None) -> int:
        if timeout is None:
            return real(self)
        while self.poll() is None and not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_the_family)
    with pytest.raises(ChildError, match="it was not done after"):
        ask_child("family", {"pid": str(pid), "stay": True}, 5.0, env)
    assert ended(int(pid.read_text()))


def test_a_schedule_that_fails_is_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that forgets the users of a split edge frees pages that are read."""
    wrong = Path(__file__).parent / "solutions/radix/wrong_split_loses_users.py"
    finish(tmp_path, ["radix"], write(find("radix"), wrong, tmp_path).read_text())
    assert main(["promises", "--dir", str(tmp_path), "--runs", "300", "--seed", "3"]) == 1
    again = re.search(r"Again: python -m minisgl.lab (.*)", capsys.readouterr().out)
    assert again is not None
    assert main(again[1].split()) == 1
    number = again[1].split()[-1]
    assert f"Schedule {number} failed" in capsys.readouterr().out


def test_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card needs no network, shows the number of schedules that ran, and knows what is out of date."""
    folder = finish(tmp_path, ["meter", "policy"])
    where = ["--dir", str(tmp_path)]
    assert main(["promises", *where, "--runs", "12", "--seed", "5"]) == 0
    assert main(["ladder", *where]) == 0
    assert main(["card", *where, "--name", "Ada & <Bob>"]) == 0
    page, svg = (tmp_path / "my_engine.html").read_text(), (tmp_path / "my_engine.svg").read_text()
    ET.fromstring(svg)
    for text in (page, svg):
        assert not re.search(r"(?:src|href)=|@import|url\(|<script", text)
        assert "Ada &amp; &lt;Bob&gt;" in text and "2 of 16 labs done" in text
        assert f"12 random schedules, seed 5: promises {', '.join(map(str, CHECKED))} held in every one" in text
        assert "5,196" in text and "worst gap 128 tokens in 88 steps; `mixed` has 128 in 88: not beaten yet" in text
        assert "out of date" not in text
    finish(tmp_path, ["policy"], solution(find("policy")) + "# another\n")
    main(["card", *where])
    assert "(out of date: policy changed since)" in (tmp_path / "my_engine.html").read_text()
    assert folder.recall_engine("promises")["runs"] == 12
    capsys.readouterr()
