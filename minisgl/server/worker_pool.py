"""The worker processes of a server: how they start, report, end, and are killed.

The launcher starts and kills the workers through `WorkerPool`. `worker_main` is the main function of a worker: it runs
the *body* of the worker's work (`minisgl.server.rank_process`, `minisgl.server.text_process`), of which this module
knows nothing. A worker reports when it is ready, and the reason if it fails. It ignores SIGINT, SIGTERM and SIGHUP,
which the launcher handles. It exits when the launcher exits, even one that was killed (promise 10). After
`WorkerPool.kill` no worker process exists any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import msgspec

from minisgl.config import ConfigError
from minisgl.core import EngineSpec
from minisgl.message.queue import Addresses
from minisgl.plugin_manager.failures import described
from minisgl.utils.log import setup_logging

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that the launcher handles and the workers ignore."""


def heeded_signals() -> list[signal.Signals]:
    """Return `SIGNALS`, without SIGHUP under nohup: then a server goes on when its terminal is closed."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


TRACEBACK_DELAY_SECONDS = 0.2
"""Seconds between the report of a failure and its traceback on standard error.

If this worker failed only because another process died, the launcher kills this worker within that time. The log then
has only the message about the process that died first.
"""
STACK_DUMP_SIGNAL = signal.SIGUSR1
"""The signal at which a worker writes its stack to standard error, even while a C call keeps the interpreter busy."""


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The report of a worker that is ready for requests.

    ``plugins`` are the plugins that the worker loaded, each as name, path and SHA-256. ``spec`` are the sizes of the
    worker's engine; None for a worker without an engine.
    """

    plugins: list[tuple[str, str, str]] = []
    spec: EngineSpec | None = None


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The report of a worker that exits with an error.

    ``options`` is true if the cause is a `ConfigError`: the user must change an option, and the message says which.
    """

    message: str
    options: bool = False


class DrainRequest(msgspec.Struct, tag=True, array_like=True):
    """The report that another rank's process was asked to end: the server drains."""


ReportMessage = Ready | Failed | DrainRequest


class Report:
    """A worker's connection to the launcher. Every thread of the worker may send."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: ReportMessage) -> None:
        if isinstance(message, Ready):
            log.info("ready")
        with self._lock, contextlib.suppress(OSError):  # the launcher has exited, and this process exits with it
            self._pipe.send_bytes(msgspec.msgpack.encode(message))


# ---- in the launcher ---------------------------------------------------------------------------------------------


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
            while not self.pipe_closed and (message := self._next_report()) is not None:
                match message:
                    case Ready():
                        self.ready = message
                    case DrainRequest():
                        self.asks_to_drain = True
                    case _:
                        self.failed = message
        except (EOFError, OSError):
            self.pipe_closed = True

    def _next_report(self) -> ReportMessage | None:
        """Return the next report, or None. Raise EOFError if the worker has closed its end of the pipe."""
        return msgspec.msgpack.decode(self.pipe.recv_bytes(), type=ReportMessage) if self.pipe.poll() else None

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


class WorkerPool:
    """All worker processes of one server."""

    def __init__(self, log_options: tuple[str, str]) -> None:
        self._log_options = log_options
        self._context = multiprocessing.get_context("spawn")
        self.workers: list[Worker] = []

    def start(self, addresses: Addresses, config: bytes, bodies: Mapping[str, Callable[..., None]]) -> None:
        """Start a worker for each of ``bodies`` (`worker_main`), by its name.

        The ranks are the first, because they take longest to start. ``config`` is the config, encoded by
        `encode_config`.
        """
        # Starting the resource tracker may unblock SIGINT and SIGTERM. Start it before they are blocked here, because
        # the workers must start with all signals of `SIGNALS` blocked.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for role, body in bodies.items():
                ours, theirs = self._context.Pipe(duplex=False)
                args = (role, self._log_options, body, theirs, addresses, config)
                process = self._context.Process(target=worker_main, args=args, name=f"minisgl-{role}")
                process.start()
                theirs.close()
                self.workers.append(Worker(role, process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

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


# ---- in the worker -----------------------------------------------------------------------------------------------


def worker_main(
    role: str,
    log_options: tuple[str, str],
    body: Callable[..., None],
    pipe: Connection,
    addresses: Addresses,
    config: bytes,
) -> None:
    """Run ``body(report, addresses, config)``, and report the exception if it raises one.

    This is the main function of a worker process. ``role`` is the worker's name, such as ``scheduler-0``.
    ``log_options`` are ``log_level`` and ``log_format``. ``pipe`` is the worker's end of the pipe to the launcher.
    The process exits with status 2 after a `ConfigError`, and with status 1 after any other exception.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=False)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(role[:15])  # what ps and top show on Linux
    setup_logging(*log_options, role)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel, addresses), name="parent-watch", daemon=True).start()
    report = Report(pipe)
    try:
        body(report, addresses, config)
    except ConfigError as error:
        report.send(Failed(str(error), options=True))
        sys.exit(2)
    except BaseException as error:
        report.send(Failed(described(error)))
        time.sleep(TRACEBACK_DELAY_SECONDS)
        log.critical("%s failed", role, exc_info=True)
        sys.exit(1)


def _exit_with(sentinel: int, addresses: Addresses) -> None:
    """Exit this process as soon as the launcher, whose sentinel this is, has exited. Remove the folder that it left."""
    wait([sentinel])
    addresses.remove()
    os._exit(1)
