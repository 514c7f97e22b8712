"""``python -m minisgl.testing.server_soak``: mixed traffic to a real server, whose answers and resources are checked.

Clients ask the same questions again and again: streamed or not, greedy or sampled with a seed, with several choices,
with stop strings, in a conversation, and some leave in the middle. The answer to a question must always be the first
one that the idle server gave. The memory and the file descriptors of each process are compared with those after the
first minute.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from minisgl.testing.serving import Server

__all__ = ["Report", "main", "run"]

OPTIONS = ("model=tutor", "num_pages=2048", "max_running_requests=32")
"""The default options of the server. Fewer pages than the questions need let requests be retracted."""
WORDS = ("page", "cache", "prefix", "request", "step", "token", "batch", "tutor", "scheduler", "engine", "rank")


class Question(NamedTuple):
    """A request, whose answer does not depend on other requests."""

    path: str
    body: dict[str, Any]


class Level(NamedTuple):
    """What a process of the server uses: resident memory in MB, and file descriptors without work."""

    memory_mb: float
    files: int


class Report(NamedTuple):
    """The result of a soak. ``before`` and ``after`` are the levels of each process, by its name."""

    answers: Counter[str]
    wrong: list[str]
    before: dict[str, Level]
    after: dict[str, Level]
    log: str

    def problems(self, memory_mb: float = 50.0) -> list[str]:
        """Return what is wrong: wrong answers, processes that grew by more than ``memory_mb``, files left open."""
        found = list(self.wrong)
        for name, level in self.before.items():
            now = self.after[name]
            if now.memory_mb > level.memory_mb + memory_mb:
                found.append(f"{name} grew from {level.memory_mb:.0f} to {now.memory_mb:.0f} MB")
            if now.files > level.files:
                found.append(f"{name} has {now.files} file descriptors, and had {level.files}")
        if "Traceback" in self.log or "ERROR" in self.log:
            found.append(f"the log has an error:\n{self.log[:2000]}")
        return found


def questions(random: Random, number: int) -> list[Question]:
    """Return ``number`` requests of all kinds. Some of them have the same prefix."""
    stems = [" ".join(random.choices(WORDS, k=random.choice((3, 40, 400)))) for _ in range(max(1, number // 6))]
    found = []
    for _ in range(number):
        text = random.choice(stems) + " " + " ".join(random.choices(WORDS, k=random.randint(1, 12)))
        body: dict[str, Any] = {"max_tokens": random.choice((1, 8, 40, 200)), "ignore_eos": random.random() < 0.7}
        if random.random() < 0.5:
            body |= {"temperature": 0.8, "seed": random.randrange(100), "top_p": random.choice((1.0, 0.9))}
        else:
            body |= {"temperature": 0.0}
        if random.random() < 0.2:
            body["n"] = random.randint(2, 4)
        if random.random() < 0.2:
            body["stop"] = [random.choice(WORDS), "\n\n"]
        if random.random() < 0.2:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.2}
        if random.random() < 0.5:
            found.append(Question("/v1/completions", {**body, "prompt": text}))
        else:
            found.append(Question("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}))
    return found


class Client:
    """One client of the server at ``url``."""

    def __init__(self, url: str):
        self._address = urllib.parse.urlsplit(url).netloc

    def ask(self, question: Question, stream: bool = False, leave_after: int | None = None) -> list[str] | None:
        """Return the text of each choice, or None if the client left after ``leave_after`` bytes of the response."""
        body = {**question.body, "stream": stream}
        connection = http.client.HTTPConnection(self._address, timeout=600)
        try:
            connection.request("POST", question.path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if leave_after is not None:
                response.read(leave_after)
                return None
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{question.path}: status {response.status}: {data[:300]!r}")
        texts = [""] * question.body.get("n", 1)
        for event in _events(data) if stream else [json.loads(data)]:
            for choice in event["choices"]:
                if "text" in choice:
                    texts[choice["index"]] += choice["text"]
                else:
                    part = choice.get("delta") or choice.get("message") or {}
                    texts[choice["index"]] += part.get("content") or ""
        return texts


def _events(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    if not lines or lines[-1] != b"[DONE]":
        raise RuntimeError(f"the stream ends with {data[-300:]!r}")
    return [json.loads(line) for line in lines[:-1]]


def run(
    options: Sequence[str], seconds: float, level_after: float, clients: int, seed: int = 0, number: int = 60
) -> Report:
    """Let ``clients`` clients use a new server for ``seconds``. The first levels are taken after ``level_after``.

    The clients draw from ``number`` questions, which the idle server answers first.
    """
    asked = questions(Random(seed), number)
    with Server(*options, "log_level=warning") as server:
        roles = {pid: name for name, pid in server.workers().items()}
        right = [Client(server.url).ask(question) for question in asked]
        idle = _levels(server, roles)
        answers: Counter[str] = Counter()
        wrong: list[str] = []
        lock = threading.Lock()
        begin = time.monotonic()

        def client(number: int) -> None:
            random = Random(seed * 1000 + number)
            while time.monotonic() - begin < seconds and not wrong:
                i = random.randrange(len(asked))
                kind = random.choice(("whole", "streamed", "streamed", "left"))
                try:
                    leave_after = random.randrange(2000) if kind == "left" else None
                    texts = Client(server.url).ask(asked[i], kind != "whole", leave_after)
                except (RuntimeError, OSError, http.client.HTTPException) as error:
                    texts, kind = [repr(error)], "failed"
                with lock:
                    answers[kind] += 1
                    if texts is not None and texts != right[i]:
                        wrong.append(f"{asked[i]} was answered {kind}: {texts}, and before: {right[i]}")

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        time.sleep(level_after)
        busy = _levels(server, roles)
        before = {name: Level(level.memory_mb, idle[name].files) for name, level in busy.items()}
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + 60
        while not server.idle_pool() and time.monotonic() < deadline:
            time.sleep(0.2)
        after = _levels(server, roles)
        while any(after[name].files > idle[name].files for name in idle) and time.monotonic() < deadline:
            time.sleep(0.2)  # the last connection may not be closed yet
            after = _levels(server, roles)
        if not server.idle_pool():
            wrong.append(f"the pool is not whole: {server.metrics()}")
        return Report(answers, wrong, before, after, server.log())


def _levels(server: Server, roles: dict[int, str]) -> dict[str, Level]:
    return {
        roles.get(process.pid, f"helper {process.pid}"): Level(process.memory_info().rss / 1e6, process.num_fds())
        for process in server.processes
    }


def main(argv: Sequence[str]) -> int:
    """Run a soak and print its result. Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.testing.server_soak", description=__doc__)
    parser.add_argument("options", nargs="*", metavar="key=value", help=f"the server's (default: {' '.join(OPTIONS)})")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=12)
    args = parser.parse_args(argv)
    report = run(args.options or OPTIONS, args.seconds, min(60.0, args.seconds / 4), args.clients)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(report.answers.items())))
    for name, level in report.before.items():
        now = report.after[name]
        print(f"{name}: {level.memory_mb:.0f} → {now.memory_mb:.0f} MB, {level.files} → {now.files} file descriptors")
    problems = report.problems()
    print("\n".join(problems) or "nothing is wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
