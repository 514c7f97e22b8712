"""One replica: a server (``python -m minisgl.cluster.attached``) with all its processes, from its start to its end.

The server is unmodified. It ends when its standard input is closed, which happens however the supervisor ends. Its
processes are a session of their own, so that none of them survives `ReplicaProcess.kill`: a GPU's memory is free once
they have exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import IO

import psutil

LOG_LINES = 20
"""Number of the last lines of a replica's log that are kept."""
LINE_BYTES = 2**20
"""The largest size of a line of a replica's output. The rest of a longer line is another line."""
EXIT_POLL_SECONDS = 0.05
OUTPUT_SECONDS = 1.0
"""Seconds to wait for the last output of a process that has ended. Another process may hold the pipe open."""


class ReplicaProcess:
    """A running server. `start` makes one. ``url`` is empty until the server is ready.

    asyncio's subprocesses are not used: their end is reported only when the last process that has inherited a pipe has
    ended too.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], json_log: bool):
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid = process.pid
        self.url = ""
        self.ready: asyncio.Future[str] = loop.create_future()
        """The server's URL, once it is ready. Cancelled if the server ends before."""
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.started = time.monotonic()
        self._process = process
        self._json_log = json_log
        self._ended: asyncio.Future[int] = loop.create_future()
        self._tasks = [asyncio.create_task(self._read_output()), asyncio.create_task(self._read_log())]
        threading.Thread(target=self._wait_in_thread, args=(loop,), name=f"wait-{name}", daemon=True).start()

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int] = (),
        json_log: bool = False,
        first_line: bytes = b"",
    ) -> ReplicaProcess:
        """Start a server, or a router that is a program of its own.

        ``name`` is put before the lines of its log. ``cores`` are those that it may use. ``first_line`` is written to
        its standard input.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        if cores and hasattr(psutil.Process, "cpu_affinity"):
            # The interpreter has hardly begun to start: every thread and process of the server inherits this.
            with contextlib.suppress(psutil.Error, OSError):
                psutil.Process(process.pid).cpu_affinity(list(cores))
        if first_line:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(first_line)
                process.stdin.flush()
        try:
            return cls(name, process, json_log)
        except BaseException:  # such as no memory for the thread that waits for the process
            process.kill()
            process.wait()
            raise

    def _wait_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._set_ended, code)

    def _set_ended(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    # ---- output ----------------------------------------------------------------------------------------------

    async def _read_output(self) -> None:
        async for line in _lines(self._process.stdout):
            _, ready, url = line.partition("minisgl is ready: ")  # a plugin may have printed before it
            if ready and not self.ready.done():
                self.url = url
                self.ready.set_result(url)
        self.ready.cancel()

    async def _read_log(self) -> None:
        async for line in _lines(self._process.stderr):
            self.log.append(line)
            if self._json_log and line.startswith("{"):
                text = f'{{"replica": "{self.name}", {line[1:]}'
            else:
                text = f"{self.name}: {line}"
            print(text, file=sys.stderr, flush=True)

    # ---- end -------------------------------------------------------------------------------------------------

    async def wait(self) -> str:
        """Wait until the server's main process has exited. Return how it ended."""
        code = await asyncio.shield(self._ended)
        await asyncio.wait(self._tasks, timeout=OUTPUT_SECONDS)  # the last lines of the log
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    @property
    def exit_status(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def terminate(self) -> None:
        """Ask the server to end: it finishes its open requests first."""
        self._process.terminate()

    def interrupt(self) -> None:
        """Let the server end at once: its open requests get an error."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    async def kill(self) -> None:
        """Kill all processes of the server, and wait until they have exited, with their GPU memory."""
        while processes := self._session():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            await asyncio.sleep(EXIT_POLL_SECONDS)
        await asyncio.shield(self._ended)
        await asyncio.wait(self._tasks, timeout=OUTPUT_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.interrupt()  # closes the pipe

    def _session(self) -> list[psutil.Process]:
        """Return the processes of the server's session that have not exited."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


async def _lines(pipe: IO[bytes] | None) -> AsyncIterator[str]:
    """Yield the lines that arrive in a pipe, until its end. Close the pipe."""
    assert pipe is not None
    stream = asyncio.StreamReader(LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line above the limit: asyncio has dropped what it had read of it
                continue
            if not line:
                return
            yield line.decode(errors="replace").rstrip("\r\n")
    finally:
        transport.close()
