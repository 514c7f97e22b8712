"""The child processes of a server: started, watched and ended by the launcher.

Knows processes and pipes, and not what they do. Nothing of it outlives `WorkerPool.kill`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from minisgl.message import Addresses
from minisgl.server.child import SHOW_STACK, Called, Failed, Ready, child_main, read_report
from minisgl.server.heartbeat import Heartbeat
from minisgl.server.rank_process import run_rank
from minisgl.server.text_process import run_text
from minisgl.utils.ports import free_port

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What the launcher handles, and its children leave to it."""


@dataclass
class Worker:
    """One child process, and what it last said."""

    role: str
    process: BaseProcess
    pipe: Connection
    heartbeat: Heartbeat | None = None
    ready: Ready | None = None
    failed: Failed | None = None
    called: Called | None = None
    hung_up: bool = False
    hangs: bool = False

    def listen(self) -> None:
        """Take in what it has said since."""
        try:
            while not self.hung_up and (news := read_report(self.pipe)) is not None:
                match news:
                    case Ready():
                        self.ready = news
                    case Called():
                        self.called = news
                    case _:
                        self.failed = news
        except (EOFError, OSError):
            self.hung_up = True

    @property
    def computes(self) -> bool:
        """Whether it is a rank."""
        return self.role.startswith("scheduler")

    @property
    def gone(self) -> bool:
        """Whether it has ended, or hangs and was killed: a driver may keep it from ending. Its sentinel tells first:
        only a moment later is there an exit status."""
        return self.hangs or bool(wait([self.process.sentinel], 0))

    @property
    def exit_reason(self) -> str:
        """How it ended."""
        if self.failed is not None:
            return self.failed.message
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        return f"it ended with status {code}"


class WorkerPool:
    """All children of one server."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.workers: list[Worker] = []

    def start(self, addresses: Addresses, model: str, config: bytes, tp: int) -> None:
        """Start them all; the ranks first, which take longest. ``model`` is a directory, ``config`` encoded."""
        rendezvous = f"127.0.0.1:{free_port()}" if tp > 1 else ""
        resource_tracker.ensure_running()  # it unblocks the signals, which the children must inherit blocked
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for rank in range(tp):
                self._start(f"scheduler-{rank}", run_rank, addresses, config, rank, rendezvous, beats=rank == 0)
            self._start("detokenizer", run_text, addresses, addresses.detokenizer, model)
            for i, address in enumerate(addresses.tokenizers):
                if address != addresses.detokenizer:
                    self._start(f"tokenizer-{i}", run_text, addresses, address, model)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _start(self, role: str, body: Callable[..., None], *args: Any, beats: bool = True) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        heartbeat = Heartbeat(self._context) if beats else None
        args = (role, body, theirs, *args, heartbeat)
        process = self._context.Process(target=child_main, args=args, name=f"minisgl-{role}")
        process.start()
        theirs.close()
        self.workers.append(Worker(role, process, ours, heartbeat))

    def dead(self) -> list[Worker]:
        """Those that have ended, first the one that says best why: an option, a failure, a mere death."""
        ended = [worker for worker in self.workers if worker.gone]
        for worker in ended:
            worker.process.join(1.0)
            worker.listen()
        return sorted(ended, key=lambda worker: 2 if worker.failed is None else not worker.failed.options)

    def kill_hung(self, hung: Worker, why: str) -> None:
        """A worker hangs: take it for dead, once it has written to the log where it is; where it is rank 0, every rank,
        since another may be the guilty one."""
        for worker in self.workers:
            if (worker is hung or (hung.computes and worker.computes)) and not worker.gone:
                assert worker.process.pid is not None
                print(f"minisgl: {worker.role} is here:", file=sys.stderr, flush=True)
                os.kill(worker.process.pid, SHOW_STACK)
                time.sleep(0.1)  # or the next one would write between its lines
        hung.process.kill()
        hung.failed, hung.hangs = Failed(why), True

    def join(self, timeout: float) -> bool:
        """Wait until all have ended, at most ``timeout`` seconds; whether they have."""
        deadline = time.monotonic() + timeout
        while alive := [worker.process.sentinel for worker in self.workers if worker.process.exitcode is None]:
            if not wait(alive, max(0.0, deadline - time.monotonic())):
                return False
        return True

    def kill(self) -> None:
        """End all at once and wait for it: a rank whose peer is gone hears nothing gentler."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()

    def close(self) -> None:
        """Close the pipes; after `kill`, when nobody watches them any more."""
        for worker in self.workers:
            worker.pipe.close()
