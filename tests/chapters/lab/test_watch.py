"""The command ``watch`` of the labs: a file is graded again whenever it is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from minisgl.chapters.lab import watch as watch_module
from minisgl.chapters.lab.watch import watch
from minisgl.testing.serving import patient_timeout

GRADER = """
import signal, sys, time
from pathlib import Path

file, log = map(Path, sys.argv[1:])
text = file.read_text()

def note(what):
    with log.open("a") as out:
        out.write(f"{what} {text}\\n")

note("begin")
if text == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    note("deaf")
if text in ("slow", "deaf"):
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(130)
note("end")
sys.exit(text != "right")
"""


class Watched:
    """A file that a thread watches. The program that grades it writes each of its actions into a log."""

    def __init__(self, folder: Path):
        self.file, self.log = folder / "mine.py", folder / "log"
        program = folder / "grader.py"
        program.write_text(GRADER)
        self.command = [sys.executable, str(program), str(self.file), str(self.log)]
        self.runs = 0

    def start(self) -> None:
        self.thread = threading.Thread(target=watch, args=(self.file, self.command, self.count), daemon=True)
        self.thread.start()

    def count(self) -> None:
        self.runs += 1

    def save(self, text: str) -> None:
        """Save the file as an editor does: write another file, then give it this name."""
        other = self.file.with_suffix(".new")
        other.write_text(text)
        os.replace(other, self.file)

    def wait(self, line: str) -> None:
        end = time.monotonic() + patient_timeout(30)
        while not self.log.exists() or line not in self.log.read_text().splitlines():
            assert time.monotonic() < end, self.log.read_text() if self.log.exists() else "no log"
            time.sleep(0.02)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watch_module, "POLL_SECONDS", 0.02)
    return Watched(tmp_path)


def test_each_save_is_graded_until_one_is_right(watched: Watched) -> None:
    watched.save("wrong")
    watched.start()
    watched.wait("end wrong")
    watched.file.unlink()  # some editors remove the file before they write it
    watched.save("worse")
    watched.wait("end worse")
    watched.save("right")
    watched.thread.join(patient_timeout(30))
    assert not watched.thread.is_alive()
    steps = [f"{what} {text}" for text in ("wrong", "worse", "right") for what in ("begin", "end")]
    assert watched.log.read_text().splitlines() == steps
    assert watched.runs == 3


def test_a_save_while_the_file_is_graded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is interrupted, and killed if it does not end."""
    monkeypatch.setattr(watch_module, "END_SECONDS", 1.0)
    watched.save("slow")
    watched.start()
    watched.wait("begin slow")
    watched.save("deaf")
    watched.wait("deaf deaf")
    watched.save("right")
    watched.thread.join(patient_timeout(60))
    assert not watched.thread.is_alive()
    lines = watched.log.read_text().splitlines()
    assert lines[-2:] == ["begin right", "end right"]
    assert "end slow" not in lines and "end deaf" not in lines


WATCH = """
import signal, sys
from pathlib import Path
from minisgl.chapters.lab.watch import watch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and those of nohup ignore this one

watch(Path(sys.argv[1]), sys.argv[2:], lambda: None)
"""


@pytest.mark.parametrize("text", ["slow", "deaf"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_grader(watched: Watched, number: signal.Signals, text: str) -> None:
    """The signal ends the program that grades, too. A second one ends it even if it ignores SIGINT."""
    watched.save(text)
    words = [sys.executable, "-c", WATCH, str(watched.file), *watched.command]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, restore_signals=True) as watcher:
        watched.wait("deaf deaf" if text == "deaf" else "begin slow")
        (grader,) = psutil.Process(watcher.pid).children()
        end = time.monotonic() + patient_timeout(60)
        watcher.send_signal(number)
        while text == "deaf" and watcher.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.2)
            watcher.send_signal(number)
        assert watcher.wait(patient_timeout(60)) != 0
    assert not grader.is_running() or grader.status() == psutil.STATUS_ZOMBIE
