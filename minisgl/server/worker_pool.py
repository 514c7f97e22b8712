"""The worker processes of a server: the ranks, the detokenizer and the tokenizers.

The launcher starts, watches and kills the workers through `WorkerPool`. This module knows processes and pipes, and not
the work that the processes do. After `WorkerPool.kill` no worker process exists any more.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from minisgl.message.queue import Addresses
from minisgl.server.rank_process import run_rank
from minisgl.server.text_process import run_text_process
from minisgl.server.worker_process import (
    SIGNALS,
    STACK_DUMP_SIGNAL,
    DrainRequest,
    Failed,
    Ready,
    read_report,
    worker_main,
)
from minisgl.utils.ports import free_port

log = logging.getLogger(__name__)


@dataclass
class Worker:
    """One worker process, and its last report of each kind.

    ``role`` is ``scheduler-<rank>``, ``detokenizer`` or ``tokenizer-<i>``. ``pipe_closed``: the worker has closed its
    end of the pipe. ``hung``: the worker hung and was killed. ``asks_to_drain``: the worker asks that the server
    drains.
    """

    role: str
    process: BaseProcess
    pipe: Connection
    ready: Ready | None = None
    failed: Failed | None = None
    pipe_closed: bool = False
    hung: bool = False
    asks_to_drain: bool = False

    def read_reports(self) -> None:
        """Read the worker's pending reports from the pipe."""
        try:
            while not self.pipe_closed and (message := read_report(self.pipe)) is not None:
                match message:
                    case Ready():
                        self.ready = message
                    case DrainRequest():
                        self.asks_to_drain = True
                    case _:
                        self.failed = message
        except (EOFError, OSError):
            self.pipe_closed = True

    @property
    def is_rank(self) -> bool:
        """Whether the worker is a tensor-parallel rank."""
        return self.role.startswith("scheduler")

    @property
    def has_ended(self) -> bool:
        """Whether the worker has exited, or hung and was killed.

        A hung worker counts as ended at once, because a device driver can delay its exit. For the others this property
        reads the process's sentinel, which becomes ready a moment before the exit status does.
        """
        return self.hung or bool(wait([self.process.sentinel], 0))

    @property
    def exit_reason(self) -> str:
        """How the worker ended, as an error message: the reported failure, the signal or the exit status."""
        if self.failed is not None:
            return self.failed.message
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        return f"it ended with status {code}, without an error message: perhaps a plugin or a library called os._exit"


@dataclass(frozen=True)
class OnlyRank0:
    """How a server runs whose other ranks are started by another program.

    ``run`` is the body of rank 0's process, and gets ``place`` as its last argument.
    ``watch_parent`` runs in a thread of the API server, and signals it to drain when the other program has ended.
    ``end_status`` is the server's exit status after a clean end.
    """

    run: Callable[..., None]
    place: object
    watch_parent: Callable[[], None]
    end_status: int


class WorkerPool:
    """All worker processes of one server."""

    def __init__(self, log_options: tuple[str, str]) -> None:
        self._log_options = log_options
        self._context = multiprocessing.get_context("spawn")
        self.workers: list[Worker] = []

    def start(
        self,
        addresses: Addresses,
        model: str,
        config: bytes,
        tp: int,
        only_rank_0: OnlyRank0 | None = None,
    ) -> None:
        """Start all workers, the ``tp`` ranks first because they take longest to start.

        ``model`` is the model's directory. ``config`` is the config, encoded by `encode_config`. With ``only_rank_0``,
        rank 0 is the only rank that is started here.
        """
        rendezvous = f"127.0.0.1:{free_port()}" if tp > 1 and only_rank_0 is None else ""
        # Starting the resource tracker may unblock SIGINT and SIGTERM. Start it before they are blocked here, because
        # the workers must start with all signals of `SIGNALS` blocked.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for rank in range(tp if only_rank_0 is None else 0):
                self._start(f"scheduler-{rank}", run_rank, addresses, config, rank, rendezvous)
            if only_rank_0 is not None:
                self._start("scheduler-0", only_rank_0.run, addresses, config, only_rank_0.place)
            self._start("detokenizer", run_text_process, addresses, addresses.detokenizer, model, config, "detokenizer")
            for i, address in enumerate(addresses.tokenizers):
                if address != addresses.detokenizer:
                    self._start(f"tokenizer-{i}", run_text_process, addresses, address, model, config, f"tokenizer-{i}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _start(self, role: str, body: Callable[..., None], addresses: Addresses, *args: Any) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        args = (role, self._log_options, body, theirs, addresses, *args)
        process = self._context.Process(target=worker_main, args=args, name=f"minisgl-{role}")
        process.start()
        theirs.close()
        self.workers.append(Worker(role, process, ours))

    def dead(self) -> list[Worker]:
        """Return the workers that have ended, the most informative first.

        A worker that reported a wrong option comes first, then a worker that reported another failure, then a worker
        that ended without a report.
        """
        ended = [worker for worker in self.workers if worker.has_ended]
        for worker in ended:
            worker.process.join(1.0)
            worker.read_reports()
        return sorted(ended, key=lambda worker: 2 if worker.failed is None else not worker.failed.options)

    def kill_hung(self, hung: Worker, why: str) -> None:
        """Log the stack of a hung worker, kill the worker, and set ``why`` as its failure.

        If the hung worker is rank 0, log the stacks of all ranks: rank 0 may be waiting for a rank that hangs.
        """
        for worker in self.workers:
            if (worker is hung or (hung.is_rank and worker.is_rank)) and not worker.has_ended:
                assert worker.process.pid is not None
                log.error("stack of %s:", worker.role)
                os.kill(worker.process.pid, STACK_DUMP_SIGNAL)
                time.sleep(0.1)  # let this worker write its stack before the next worker writes
        hung.process.kill()
        hung.failed, hung.hung = Failed(why), True

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until all workers have exited. Return whether all of them have."""
        deadline = time.monotonic() + timeout
        while alive := [worker.process.sentinel for worker in self.workers if worker.process.exitcode is None]:
            if not wait(alive, max(0.0, deadline - time.monotonic())):
                return False
        return True

    def kill(self) -> None:
        """Kill all workers and wait until they have exited.

        The signal is SIGKILL, because a rank that is blocked in a collective with a dead peer does not react to
        any other signal.
        """
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()

    def close(self) -> None:
        """Close the pipes. Call this after `kill`, when the event loop no longer watches them."""
        for worker in self.workers:
            worker.pipe.close()
