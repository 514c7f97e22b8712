"""The parts that all worker processes of a server share: `worker_main`, and the reports to the launcher.

A worker process reports when it is ready, and the reason if it fails. It ignores SIGINT, SIGTERM and SIGHUP, which the
launcher handles. It exits when the launcher exits, even one that was killed (promise 10).
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
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from minisgl.config import ConfigError
from minisgl.core import EngineSpec
from minisgl.message.queue import Addresses
from minisgl.plugin_manager.failures import described
from minisgl.utils.log import setup_logging

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that the launcher handles and the workers ignore."""
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


def read_report(pipe: Connection) -> ReportMessage | None:
    """Return the worker's next report, or None if no report has arrived. The launcher calls this.

    Raise EOFError if the worker has closed its end of the pipe.
    """
    return msgspec.msgpack.decode(pipe.recv_bytes(), type=ReportMessage) if pipe.poll() else None


def worker_main(
    role: str,
    log_options: tuple[str, str],
    body: Callable[..., None],
    pipe: Connection,
    addresses: Addresses,
    *args: Any,
) -> None:
    """Run ``body(report, addresses, *args)``, and report the exception if it raises one.

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
        body(report, addresses, *args)
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
