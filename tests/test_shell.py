"""Chatting in the terminal: through a pipe and at a real one, with a server that runs and with the shell's own."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from minisgl.shell import Chat, ChatError
from minisgl.testing.serving import Server, patience

SHELL = [sys.executable, "-m", "minisgl.shell"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("model=tutor", "num_pages=256") as server:
        yield server


def pipe(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SHELL, *words], input=text, capture_output=True, text=True, timeout=patience(60))


def test_lines_from_a_pipe_are_answered(server: Server) -> None:
    done = pipe("What is 12 + 30?\n\n/reset\nWhat is 1 + 2?\n/exit\nnever\n", "--url", server.url, "--temperature=0")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert done.stderr == ""
    assert "42" in lines[0]
    assert lines[1] == "The conversation is forgotten."
    assert "3" in lines[2]
    assert len(lines) == 3


def test_the_conversation_goes_on_until_reset(server: Server) -> None:
    chat = Chat(server.url, temperature=0, max_tokens=20)
    first = "".join(chat.say("Hello!"))
    second = "".join(chat.say("What is 1 + 2?"))
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 2
    assert [turn["content"] for turn in chat.turns] == ["Hello!", first, "What is 1 + 2?", second]
    chat.reset()
    assert chat.turns == []


def test_an_answer_that_is_cut_short_is_kept_as_far_as_it_came(server: Server) -> None:
    chat = Chat(server.url, temperature=0, max_tokens=1000, ignore_eos=True)
    pieces = chat.say("Hello!")
    said = next(pieces) + next(pieces) + next(pieces)
    pieces.close()
    assert chat.turns[-1] == {"role": "assistant", "content": said}
    deadline = time.monotonic() + patience(1.0)
    while not server.idle_pool() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.idle_pool()


def test_errors_are_told_and_not_remembered(server: Server) -> None:
    chat = Chat(server.url, max_tokens=-1)
    with pytest.raises(ChatError, match="max_tokens must be at least 1"):
        list(chat.say("Hello!"))
    assert chat.turns == []
    with pytest.raises(ChatError, match="No answer from http"):
        list(Chat("http://127.0.0.1:1").say("Hello!"))
    with pytest.raises(ChatError, match="not the address of a server"):
        Chat("ftp://nowhere")
    done = pipe("Hello!\n", "--url", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("minisgl: No answer")
    assert len(done.stderr.splitlines()) == 1


class Terminal:
    """The shell at a pseudo-terminal."""

    def __init__(self, *words: str, home: Path):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*SHELL, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "XDG_CACHE_HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, what: str, timeout: float = 30.0) -> str:
        """Read until the pattern comes; what was seen with it."""
        deadline = time.monotonic() + patience(timeout)
        while (match := re.search(what, self.seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"waited for {what!r}, saw {self.seen!r}"
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
        seen, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_at_a_terminal(server: Server, tmp_path: Path) -> None:
    terminal = Terminal("--url", server.url, "--temperature=0", home=tmp_path)
    try:
        terminal.expect("Talking to " + re.escape(server.url))
        terminal.expect(">")
        terminal.type("What is 12 + 30?\r")
        terminal.expect("= 42")
        terminal.type("\x1b[A")  # up: the line before
        terminal.expect(r"What is 12 \+ 30\?")
        terminal.type("\x03/what\r")  # Ctrl-C drops it
        terminal.expect("There is no /what")
        terminal.type("/reset\r")
        terminal.expect("forgotten")
        terminal.type("/exit\r")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
    assert "What is 12 + 30?" in (tmp_path / "minisgl" / "shell_history").read_text()


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_its_own_server_ends_with_it(tmp_path: Path) -> None:
    done = pipe("What is 12 + 30?\n", "--temperature=0", "model=tutor", "device=cpu", "num_pages=64")
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    terminal = Terminal("device=cpu", "num_pages=64", home=tmp_path)
    try:
        terminal.expect("Talking to")
        family = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(family) >= 4
        terminal.process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + patience(2.0)
        while (left := [p for p in family if runs(p)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
    finally:
        terminal.close()


def test_wrong_options_of_its_own_server() -> None:
    done = pipe("Hello!\n", "cache=redis")
    assert done.returncode == 2
    assert "redis" in done.stderr
    assert "Traceback" not in done.stderr
    assert pipe("", "--url", "http://127.0.0.1:1", "tp=2").returncode == 2
