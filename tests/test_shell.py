"""`python -m minisgl.shell`: a chat through a pipe and at a terminal, with a running server or with its own."""

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

from minisgl.plugins.command.shell import Chat, ChatError
from minisgl.testing.serving import Server, patient_timeout

pytestmark = pytest.mark.xdist_group("test_shell")  # one process: the server starts once

SHELL = [sys.executable, "-m", "minisgl.shell"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("model=tutor", "num_pages=256") as server:
        yield server


def pipe(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SHELL, *words], input=text, capture_output=True, text=True, timeout=patient_timeout(60))


def test_piped_lines(server: Server) -> None:
    done = pipe("What is 12 + 30?\n\n/reset\nWhat is 1 + 2?\n/exit\nnever\n", "--url", server.url, "--temperature=0")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert done.stderr == ""
    assert "42" in lines[0]
    assert lines[1] == "The conversation was cleared."
    assert "3" in lines[2]
    assert len(lines) == 3


def test_messages_and_reset(server: Server) -> None:
    chat = Chat(server.url, temperature=0, max_tokens=20)
    first = "".join(chat.send("Hello!"))
    second = "".join(chat.send("What is 1 + 2?"))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in chat.messages] == ["Hello!", first, "What is 1 + 2?", second]
    chat.reset()
    assert chat.messages == []


def test_stopped_reply_is_kept(server: Server) -> None:
    """A reply that the user stops stays in the conversation as far as it was received, and the request is aborted."""
    chat = Chat(server.url, temperature=0, max_tokens=1000, ignore_eos=True)
    pieces = chat.send("Hello!")
    reply = next(pieces) + next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": reply}
    assert server.wait_until_idle(1.0)


def test_errors(server: Server) -> None:
    """An error is reported, and the message that caused it is not added to the conversation."""
    chat = Chat(server.url, max_tokens=-1)
    with pytest.raises(ChatError, match="max_tokens must be at least 1"):
        list(chat.send("Hello!"))
    assert chat.messages == []
    with pytest.raises(ChatError, match="No reply from http"):
        list(Chat("http://127.0.0.1:1").send("Hello!"))
    with pytest.raises(ChatError, match="not the address of a server"):
        Chat("ftp://nowhere")
    done = pipe("Hello!\n", "--url", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("minisgl: No reply")
    assert len(done.stderr.splitlines()) == 1


class Terminal:
    """The shell as a process at a pseudo-terminal. ``seen`` is its output that `expect` has not consumed."""

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

    def expect(self, pattern: str, timeout: float = 30.0) -> str:
        """Read the output until the regular expression matches. Return the output up to the end of the match."""
        deadline = time.monotonic() + patient_timeout(timeout)
        while (match := re.search(pattern, self.seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"waited for {pattern!r}, saw {self.seen!r}"
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
        terminal.expect("Connected to " + re.escape(server.url))
        terminal.expect(">")
        terminal.type("What is 12 + 30?\r")
        terminal.expect("= 42")
        terminal.type("\x1b[A")  # the Up key: the previous line
        terminal.expect(r"What is 12 \+ 30\?")
        terminal.type("\x03/what\r")  # Ctrl-C discards the line
        terminal.expect("There is no command /what")
        terminal.type("/reset\r")
        terminal.expect("was cleared")
        terminal.type("/exit\r")
        assert terminal.process.wait(patient_timeout(10)) == 0
    finally:
        terminal.close()
    assert "What is 12 + 30?" in (tmp_path / "minisgl" / "shell_history").read_text()


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_own_server_ends_with_the_shell(tmp_path: Path) -> None:
    """A server that the shell started exits with the shell, also if the shell is killed."""
    done = pipe("What is 12 + 30?\n", "--temperature=0", "model=tutor", "device=cpu", "num_pages=64")
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    assert "loading weights" in done.stderr and "minisgl.access" not in done.stderr
    terminal = Terminal("device=cpu", "num_pages=64", home=tmp_path)
    try:
        terminal.expect("Connected to")
        family = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(family) >= 4
        terminal.process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + patient_timeout(2.0)
        while (left := [p for p in family if is_running(p)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
    finally:
        terminal.close()


def test_wrong_options_of_own_server() -> None:
    done = pipe("Hello!\n", "cache=redis")
    assert done.returncode == 2
    assert "redis" in done.stderr
    assert "Traceback" not in done.stderr
    assert pipe("", "--url", "http://127.0.0.1:1", "tp=2").returncode == 2


LOUD = """
import sys
from minisgl import hookimpl

print("before the URL", end="")

@hookimpl
def minisgl_step_finished(result):
    print("printed " * 4000)
    print("logged", file=sys.stderr)
"""


def test_plugin_that_prints(tmp_path: Path) -> None:
    """What a plugin prints neither hides the server's URL, nor fills a pipe, nor gets into the answers."""
    (tmp_path / "loud.py").write_text(LOUD)
    words = ["--temperature=0", "model=tutor", "device=cpu", "num_pages=64", f"plugins=[{tmp_path / 'loud.py'}]"]
    done = pipe("What is 12 + 30?\nWhat is 1 + 2?\n", *words)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "42" in line]
    assert "printed" not in done.stdout and "logged" not in done.stderr and "before the URL" in done.stderr
    shown = pipe("What is 12 + 30?\n", *words, "log_level=warning")
    assert "printed" not in shown.stdout and "logged" in shown.stderr  # the user asked for a log
