"""Runs one abuse in a process of its own, and watches the server meanwhile as its other clients do."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import re
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from minisgl.bench.abuses.catalogue import ABUSES
from minisgl.bench.abuses.sending import Target
from minisgl.utils.process import raise_file_limit

HEALTH_SECONDS = 0.05
"""Seconds between two requests for ``/health``."""
PAUSE_SECONDS = 0.01
"""Seconds between a response to another client and this client's next request."""
SETTLE_SECONDS = 60.0
"""The longest time to wait, after an abuse, until the server has no open request and its memory is back."""
MEMORY_MB = 50.0
"""Memory counts as given back when it is at most this far above its level before the abuse."""


class Watched(NamedTuple):
    """A server: its address, and its processes and folder of temporary files if the benchmark started it."""

    url: str
    processes: Sequence[psutil.Process]
    folder: str | None


class Report(NamedTuple):
    """What one abuse did. Figures of the server's processes are None if the benchmark did not start the server.

    ``answers`` counts the answers to the abuse. ``p50_ms``, ``p99_ms`` and ``failed`` are the latency of the other
    clients' requests while the abuse ran, in milliseconds, and the number of those that failed. ``more_files`` is the
    number of file descriptors that were not closed.
    """

    name: str
    seconds: float
    answers: dict[str, int]
    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    health_p99_ms: float
    health_failed: int
    memory_before_mb: float | None
    memory_peak_mb: float | None
    memory_after_mb: float | None
    more_files: int | None
    open_requests: int | None


class _Client(threading.Thread):
    """A client that sends the same request again and again, with a pause of ``pause`` seconds between two of them."""

    def __init__(self, url: str, method: str, path: str, body: dict[str, Any] | None, pause: float):
        super().__init__(daemon=True)
        self.latencies: list[float] = []
        self.failed = 0
        self._address = urllib.parse.urlsplit(url).netloc
        self._request = (method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        self._pause, self._end = pause, threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            begin = time.perf_counter()
            try:
                connection = http.client.HTTPConnection(self._address, timeout=60)
                connection.request(*self._request)
                response = connection.getresponse()
                response.read()
                self.failed += response.status != 200
                connection.close()
            except (OSError, http.client.HTTPException):
                self.failed += 1
            self.latencies.append(time.perf_counter() - begin)
            self._end.wait(self._pause)

    def end(self) -> None:
        self._end.set()
        self.join()


def warm_up(url: str, answers: int = 128, tokens: int = 480) -> None:
    """Let the server generate ``answers`` of ``tokens`` each at once, so that its memory has reached its level."""
    body = {"prompt": "The tutor", "n": answers, "max_tokens": tokens, "ignore_eos": True, "temperature": 1}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=600).close()


def abuse(watched: Watched, name: str, seconds: float, pause: float = PAUSE_SECONDS) -> Report:
    """Run the abuse called ``name`` for at most ``seconds``, and return what was seen.

    Meanwhile two other clients send requests, each ``pause`` seconds after the response to its last one.
    """
    before, files = _memory_mb(watched), _files(watched)
    short = {"prompt": "The tutor", "max_tokens": 8, "ignore_eos": True}
    clients = [_Client(watched.url, "POST", "/v1/completions", short, pause) for _ in range(2)]
    health = _Client(watched.url, "GET", "/health", None, HEALTH_SECONDS)
    for client in (*clients, health):
        client.start()
    peak = before
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, name, watched.url, watched.folder, seconds), daemon=True)
    process.start()
    sender.close()
    while process.is_alive() and not receiver.poll(0.2):
        peak = _larger(peak, _memory_mb(watched))
    duration = time.monotonic() - begin
    for client in (*clients, health):
        client.end()
    try:
        answers: Counter[str] = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process of the abuse {name!r} ended with status {process.exitcode}") from None
    process.join()
    after = _settle(watched, before)
    latencies = np.array([latency for client in clients for latency in client.latencies]) * 1e3
    p50, p99 = np.percentile(latencies, [50, 99])
    return Report(
        name,
        round(duration, 1),
        dict(answers),
        len(latencies),
        sum(client.failed for client in clients),
        round(float(p50), 1),
        round(float(p99), 1),
        round(float(np.percentile(health.latencies, 99)) * 1e3, 1),
        health.failed,
        before,
        peak,
        after,
        None if files is None else (_files(watched) or 0) - files,
        _open_requests(watched),
    )


def _run(sender: Any, name: str, url: str, folder: str | None, seconds: float) -> None:
    """Run an abuse, with a low priority: the machine's cores are the server's, and those of its other clients."""
    with contextlib.suppress(OSError):
        os.nice(19)
    raise_file_limit(2**16)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        max_model_len = json.load(response)["data"][0]["max_model_len"]
    address = urllib.parse.urlsplit(url)
    assert address.hostname is not None
    target = Target(address.hostname, address.port or 80, max_model_len, time.monotonic() + seconds, folder)
    sender.send(asyncio.run(ABUSES[name].run(target)))


def _memory_mb(watched: Watched) -> float | None:
    """Return the resident memory of all the server's processes in MB."""
    return _total(watched, lambda process: process.memory_info().rss / 1e6)


def _files(watched: Watched) -> int | None:
    """Return the number of file descriptors of all the server's processes."""
    total = _total(watched, lambda process: process.num_fds())
    return None if total is None else int(total)


def _total(watched: Watched, value: Callable[[psutil.Process], float]) -> float | None:
    if not watched.processes:
        return None
    total = 0.0
    for process in watched.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += value(process)
    return round(total, 1)


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None or (b is not None and b > a) else a


def _open_requests(watched: Watched) -> int | None:
    """Return the number of open requests, or None if the server does not have this metric of minisgl's."""
    with urllib.request.urlopen(f"{watched.url}/metrics", timeout=60) as response:
        found = re.search(r"^minisgl_open_requests (\S+)$", response.read().decode(), re.MULTILINE)
    return None if found is None else int(float(found[1]))


def _settle(watched: Watched, before: float | None) -> float | None:
    """Wait until no request is open and the memory is back, at most `SETTLE_SECONDS`. Return the memory in MB."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        memory = _memory_mb(watched)
        back = before is None or memory is None or memory <= before + MEMORY_MB
        if (back and not _open_requests(watched)) or time.monotonic() > deadline:
            return memory
        time.sleep(0.5)
