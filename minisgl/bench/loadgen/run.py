"""Runs one measurement: starts the client processes, shows their progress, and collects their results."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from minisgl.bench.loadgen.completion import RequestRecord
from minisgl.bench.loadgen.plan import Plan, WorkerResult
from minisgl.bench.loadgen.worker import run_worker
from minisgl.config import ConfigError

START_DELAY = 0.1
"""Seconds between the order to start and the start, in which the order reaches every process."""
Progress = Callable[[int, int, int], None]
Message = tuple[str, Any]
"""A message of a client process: its kind (ready, progress, result) and content."""


@dataclass
class Measurement:
    """The results of all client processes. ``interrupted``: Ctrl-C ended the measurement early."""

    start: float
    results: list[WorkerResult] = field(default_factory=list)
    interrupted: bool = False
    stopped: float = 0.0
    warmup_errors: list[str] = field(default_factory=list)
    drafts: dict[str, Any] = field(default_factory=dict)
    """The fields of `draft_fields`."""

    @property
    def records(self) -> list[RequestRecord]:
        return [record for result in self.results for record in result.records]

    @property
    def duration(self) -> float:
        """Seconds from the start to the end of the last response, or to the interruption."""
        ends = [record.end for record in self.records if not record.interrupted]
        end = max(ends, default=self.start)
        return max(0.0, (max(end, self.stopped) if self.interrupted else end) - self.start)


class _Client:
    """One client process and the pipe to it."""

    def __init__(self, plan: Plan):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=run_worker, args=(plan, other), daemon=True)
        self.process.start()
        other.close()

    def send(self, message: float | None) -> None:
        with contextlib.suppress(OSError):  # a process that has ended is noticed when its pipe is read
            self.pipe.send(message)

    def receive(self) -> Message:
        try:
            message: Message = self.pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join(5)
            raise ConfigError(f"a client process ended with status {self.process.exitcode}.") from error
        return message

    def close(self) -> None:
        self.pipe.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Interrupt:
    """Whether Ctrl-C was pressed. The second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextlib.contextmanager
def _catch_interrupt() -> Iterator[_Interrupt]:
    """Replace the handler of SIGINT inside the context. In another thread than the main thread, do nothing."""
    interrupt = _Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def run(
    plans: Sequence[Plan],
    progress: Progress = lambda done, failed, tokens: None,
    before_start: Callable[[], None] = lambda: None,
) -> Measurement:
    """Run one measurement with one client process per plan.

    ``progress`` is called with the numbers of requests completed, requests failed and tokens generated since its last
    call. ``before_start`` is called once, after the warm-up. Raise `ConfigError` if every warm-up request failed.
    """
    with _catch_interrupt() as interrupt, contextlib.ExitStack() as stack:
        clients = []
        for plan in plans:
            clients.append(_Client(plan))
            stack.callback(clients[-1].close)
        ready = _wait_for("ready", clients, interrupt, progress)
        errors = [error for _, failed in ready for error in failed]
        if errors and len(errors) == max(plan.warmup for plan in plans):
            raise ConfigError(f"every warm-up request failed: {errors[0]}")
        before_start()
        measurement = Measurement(time.perf_counter() + START_DELAY, warmup_errors=errors)
        for client in clients:
            client.send(None if interrupt.pressed else measurement.start)
        found = _wait_for("result", clients, interrupt, progress)
        measurement.results = [content for _, content in found]
        measurement.interrupted, measurement.stopped = interrupt.pressed, time.perf_counter()
        return measurement


def _wait_for(kind: str, clients: Sequence[_Client], interrupt: _Interrupt, progress: Progress) -> list[Message]:
    """Return the next message of this kind from each client. Call ``progress`` meanwhile.

    After Ctrl-C, tell the clients to stop. A client that was stopped before it was ready sends its result at once,
    which is empty: then raise KeyboardInterrupt, because there is nothing to report.
    """
    found: dict[Pipe, Message] = {}
    by_pipe = {client.pipe: client for client in clients}
    stopped = False
    while len(found) < len(clients):
        for pipe in wait([pipe for pipe in by_pipe if pipe not in found], timeout=0.1):
            assert isinstance(pipe, Pipe)
            message = by_pipe[pipe].receive()
            if message[0] == kind:
                found[pipe] = message
            elif message[0] == "progress":
                progress(*message[1])
            elif message[0] == "result":
                raise KeyboardInterrupt
        if interrupt.pressed and not stopped:
            stopped = True
            for client in clients:
                client.send(None)
    return [found[client.pipe] for client in clients]
