"""What `lab grade` copies and refuses of a submission; students' texts in the report; limits of all processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.chapters.lab.catalog import find
from minisgl.chapters.lab.cli import main
from minisgl.chapters.lab.grader.gate_process import LOADS
from minisgl.chapters.lab.grading import intake, report
from minisgl.chapters.lab.grading.intake import RefusedError, take_in
from minisgl.chapters.lab.grading.submissions import Submission, similarity, submissions
from minisgl.chapters.lab.grading.text import name, one_line, several_lines
from minisgl.chapters.lab.grading.usage import Usage
from minisgl.chapters.lab.skeletons import skeleton
from minisgl.chapters.lab.verdicts import Verdict
from minisgl.testing.serving import patient_timeout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`lab grade` needs Linux, and says so")
POLICY, CAPSTONE = find("policy"), find("capstone")
SECRET = "TOKEN hunter2"


def _socket(at: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(at))  # an absolute path may be too long for a socket


def _sparse(at: Path) -> None:
    at.touch()
    os.truncate(at, 10 * 2**30)


ODD: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "link": (lambda at, private: at.symlink_to(private), "symbolic link"),
    "broken link": (lambda at, private: at.symlink_to(at.parent / "none"), "symbolic link"),
    "link to itself": (lambda at, private: at.symlink_to(at), "symbolic link"),
    "link to a folder": (lambda at, private: at.symlink_to(private.parent), "symbolic link"),
    "hard link": (lambda at, private: at.hardlink_to(private), "hard link"),
    "fifo": (lambda at, private: os.mkfifo(at), "FIFO"),
    "socket": (lambda at, private: _socket(at), "socket"),
    "sparse": (lambda at, private: _sparse(at), "bytes"),
}


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Return a file of the instructor that no submission may show."""
    path = tmp_path / "private" / "notes.txt"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", ["my_policy.py", "my_capstone/inner/part.py"])
def test_refused(tmp_path: Path, private: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd entry is refused by its name, as the submitted file and deep in a submitted folder."""
    make, word = ODD[kind]
    at = tmp_path / "class" / "eve" / place
    at.parent.mkdir(parents=True)
    monkeypatch.chdir(at.parent)
    make(at, private)
    (found,) = submissions(tmp_path / "class")
    with pytest.raises(RefusedError, match=word) as refused:
        take_in(found.path, tmp_path / "copy", folder=not found.lab.plugin)
    assert str(refused.value).startswith(place) and SECRET not in str(refused.value)


def test_folders_copied(tmp_path: Path) -> None:
    """Hidden entries and compiled files are left out; the modes of the copy are plain."""
    source = tmp_path / "my_capstone"
    for file in ("a.py", "inner/b.py", ".git/config", "inner/__pycache__/b.pyc"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(file)
    (source / "a.py").chmod(0o4777)
    take_in(source, tmp_path / "copy", folder=True)
    found = {str(path.relative_to(tmp_path / "copy")): path for path in (tmp_path / "copy").rglob("*")}
    assert set(found) == {"a.py", "inner", "inner/b.py"}
    assert found["a.py"].read_text() == "a.py" and not found["a.py"].stat().st_mode & 0o4111


def test_students_folder_is_a_link(tmp_path: Path, private: Path) -> None:
    """The link is the student's name, and its files are not read."""
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "eve").symlink_to(private.parent)
    (private.parent / POLICY.file).write_text(SECRET)
    (found,) = submissions(tmp_path / "class")
    assert found.student == "eve"
    with pytest.raises(RefusedError, match="eve is a symbolic link"):
        take_in(found.path, tmp_path / "copy", folder=False)


def test_submitted_folder_may_be_named_by_a_link(tmp_path: Path) -> None:
    """The instructor's own DIR may be a link."""
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / POLICY.file).write_text("x = 1")
    (tmp_path / "link").symlink_to(tmp_path / "class")
    (found,) = submissions(tmp_path / "link")
    take_in(found.path, tmp_path / "copy", folder=False)
    assert (found.student, (tmp_path / "copy").read_text()) == ("class", "x = 1")


def test_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of entries, their depth and all bytes together are limited."""
    for limit, value in (("MOST_ENTRIES", 10), ("MOST_DEPTH", 4), ("MOST_BYTES", 50)):
        monkeypatch.setattr(intake, limit, value)
    for case, files in {
        "files and folders": [f"empty{i}" for i in range(10)],
        "inside each other": ["a/b/c/d/e"],
        "in all": [f"f{i}" for i in range(6)],
    }.items():
        source = tmp_path / case.replace(" ", "-") / CAPSTONE.file
        for file in files:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_bytes(b"" if file.startswith("empty") else b"x" * 9)
        with pytest.raises(RefusedError, match=case):
            take_in(source, tmp_path / f"copy of {case}", folder=True)


@pytest.mark.parametrize("odd", [b"two\nlines.py", b"\x1b[2J.py", b"\xff.py", b"x" * 230, "a\u202eb.py".encode()])
def test_odd_names(tmp_path: Path, odd: bytes) -> None:
    source = tmp_path / CAPSTONE.file
    source.mkdir()
    Path(os.fsdecode(os.fsencode(source) + b"/" + odd)).touch()
    with pytest.raises(RefusedError, match="Rename it") as refused:
        take_in(source, tmp_path / "copy", folder=True)
    assert str(refused.value).isprintable()


def test_kind_of_the_submission(tmp_path: Path) -> None:
    (tmp_path / POLICY.file).mkdir()
    (tmp_path / CAPSTONE.file).touch()
    for lab in (POLICY, CAPSTONE):
        with pytest.raises(RefusedError, match="This lab's submission is a"):
            take_in(tmp_path / lab.file, tmp_path / "copy", folder=not lab.plugin)


def test_command_refuses_a_link(tmp_path: Path, private: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The report says which submission was refused and why, without points and without the linked file's text."""
    at = tmp_path / "class" / "eve\n9 of 9" / POLICY.file
    at.parent.mkdir(parents=True)
    at.symlink_to(private)
    assert main(["grade", str(tmp_path / "class"), "--gate", "loads"]) == 1
    out = capfd.readouterr().out
    assert "  refused, not graded: my_policy.py is a symbolic link." in out and SECRET not in out
    assert "eve\\n9 of 9: lab policy, 0 of 1 points, failed" in out
    assert main(["grade", str(tmp_path / "class"), "--gate", "loads", "--json"]) == 1
    (result,) = json.loads(capfd.readouterr().out)["submissions"]
    assert (result["status"], result["gates"][0]["result"], result["sha256"]) == ("failed", "blocked", "")


def test_large_file_has_no_similarity(tmp_path: Path) -> None:
    path = tmp_path / POLICY.file
    path.write_text("x = (1,)\n" * 40000)
    assert similarity(POLICY, path) is None


# ---- texts ------------------------------------------------------------------------------------------------------

FORGED = "x\n\x1b[1A\x1b[2K\rfay: lab policy, 7 of 7 points\u2028\u202e\x85\x9b1A\x00\udcff"


def test_texts() -> None:
    shown = one_line(FORGED)
    assert shown.isprintable() and "\\x1b[1A" in shown and "\\xff" in shown
    assert several_lines("a\r\nb\tc\x1b") == "a\nb       c\\x1b"
    assert name("ada lovelace") == "ada lovelace"
    assert name("bob: lab policy, 7 of 7 points") == '"bob: lab policy, 7 of 7 points"'


def test_report_has_no_control_characters(tmp_path: Path) -> None:
    """A verdict that a student's process wrote has one line for each gate; in JSON, no text has a control character."""
    path = tmp_path / POLICY.file
    path.write_text(skeleton(POLICY))
    fields = {"note": FORGED, "cause": "raises", "promise": FORGED, "seen": FORGED * 100, "show": f"{FORGED}\nend"}
    verdict = {**Verdict(LOADS.name, "says").encode(), **fields, "workload": {FORGED: [FORGED, 1]}}
    for verdicts, failed in (([verdict], None), ([], FORGED)):
        result = report.result_of(
            Submission(FORGED, POLICY, path), [], verdicts, seconds=1.0, cpu_seconds=1.0, only=["loads"], failed=failed
        )
        lines = list(report.lines(result))
        assert len(lines) == (2 if failed is None else 3)
        assert all(line.isprintable() and len(line) < 700 for line in lines)
        assert lines[0].startswith('"x')

        def check(value: object) -> None:
            if isinstance(value, str):
                assert value.replace("\n", "").isprintable()
            elif isinstance(value, dict):
                [check(each) for pair in value.items() for each in pair]
            elif isinstance(value, list):
                [check(each) for each in value]

        check(result)
        assert all("\n" not in result["gates"][0][field] for field in ("note", "promise", "seen"))


# ---- memory and disk ----------------------------------------------------------------------------------------------

GRADER = """
import subprocess, sys
from pathlib import Path
from minisgl.chapters.lab.grading.usage import UsageLimit

with (
    UsageLimit(Path.cwd(), memory=150 * 2**20, disk=30 * 2**20) as limit,
    subprocess.Popen([sys.executable, *sys.argv[1:]]) as process,
):
    print(process.wait(), limit.broken.cause, limit.broken.seen, flush=True)
"""
HUNGRY = """
import os, sys, time
for _ in range(2):
    if os.fork() == 0:
        break
kept = bytearray(b"x") * int(sys.argv[1])
files = []
for i in range(int(sys.argv[2])):
    name = f"file{os.getpid()}"
    files.append(open(name, "wb"))
    os.unlink(name)
    files[-1].write(b"x" * 2**20)
    files[-1].flush()
time.sleep(600)
"""


@pytest.mark.parametrize(("size", "files", "cause"), [(60 * 2**20, 0, "memory"), (0, 20, "disk")])
def test_total_of_several_processes(tmp_path: Path, size: int, files: int, cause: str) -> None:
    """Each process is below the limit; together they are above it. Deleted files that are open count too."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    command = [sys.executable, "-c", GRADER, "hungry.py", str(size), str(files)]
    limit = patient_timeout(120)
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit, check=True)
    assert ran.stdout.startswith(f"-9 {cause} The processes together used 0."), ran.stdout


def test_small_files_count(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i}").touch()
    assert Usage(tmp_path).disk >= 100 * 4096


SHARING = """
import os, signal
from pathlib import Path
from minisgl.chapters.lab.grading import usage

usage.MEMORY_BYTES = 0
kept = bytearray(b"x") * (80 << 20)
children = []
for _ in range(7):
    children.append(os.fork())
    if children[-1] == 0:
        signal.pause()
print(usage.Usage(Path("none")).memory)
for child in children:
    os.kill(child, signal.SIGKILL)
"""


def test_shared_pages_count_once(tmp_path: Path) -> None:
    """Forked processes share the pages that they do not write."""
    command = [sys.executable, "-c", SHARING]
    limit = patient_timeout(120)
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit, check=True)
    assert 70 * 2**20 < int(ran.stdout) < 400 * 2**20  # seven times 80 MiB are 560 MiB
