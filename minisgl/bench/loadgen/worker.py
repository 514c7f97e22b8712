"""One client process: an event loop that sends its share of the requests and records the responses.

The process imports no torch. It talks to `minisgl.bench.loadgen.run` over a pipe: it reports that it is ready, waits
for the start time, reports its progress, and at the end returns its records and how busy it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

from minisgl.bench.loadgen.completion import RequestRecord, StreamReader, exchange
from minisgl.bench.loadgen.http import HttpClient
from minisgl.bench.loadgen.plan import BodyQueue, Plan, WorkerResult
from minisgl.bench.loadgen.prompts import PromptFactory
from minisgl.bench.loadgen.traces import TraceRequest
from minisgl.utils.process import raise_file_limit

MAX_FILES = 2**16
"""Number of open connections that a process asks the system for, if its limit of file descriptors is lower."""
LAG_INTERVAL = 0.02
"""Seconds between two measurements of the event loop's lag."""
REPORT_INTERVAL = 0.2
"""Seconds between two reports of progress."""
WARMUP_INDEX = 2**40
"""Index of the first warm-up request. No measured request has an index this large."""


class Worker:
    """The state of one client process."""

    def __init__(self, plan: Plan, pipe: Pipe):
        self.plan, self.pipe = plan, pipe
        self.http = HttpClient(plan.address)
        self.bodies = BodyQueue(plan)
        self.result = WorkerResult()
        self.reported = 0  # number of records that were reported as progress
        self.finished: asyncio.Task[None] | None = None
        self.started: asyncio.Future[float] | None = None

    # ---- the life of the process -----------------------------------------------------------------------

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        self.started = loop.create_future()
        loop.add_reader(self.pipe.fileno(), self._read_pipe)
        self.finished = asyncio.create_task(self._warm_up_and_run())
        with contextlib.suppress(asyncio.CancelledError):
            await self.finished
        loop.remove_reader(self.pipe.fileno())
        self.http.close()
        self.pipe.send(("result", self.result))

    def _read_pipe(self) -> None:
        """Read the start time, or the order to stop. A closed pipe is an order to stop."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            message = None
        if message is None:
            assert self.finished is not None
            self.finished.cancel()
        elif self.started is not None and not self.started.done():
            self.started.set_result(message)

    async def _warm_up_and_run(self) -> None:
        self.pipe.send(("ready", await self._warm_up()))
        assert self.started is not None
        start = await self.started
        gc.collect()
        gc.freeze()
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        helpers = [asyncio.create_task(self._measure_lag()), asyncio.create_task(self._report())]
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            await (self._closed_loop(start) if self.plan.due is None else self._open_loop(start))
        finally:
            self.result.cpu_seconds = time.process_time() - cpu
            self.result.wall_seconds = time.perf_counter() - wall
            for helper in helpers:
                helper.cancel()
            self._report_new()

    async def _warm_up(self) -> list[str]:
        """Send the warm-up requests, all at once. Return the reasons of those that failed."""
        plan = self.plan
        prompts = PromptFactory(plan.prompts.vocabulary, plan.prompts.seed + 1, plan.prompts.shared)
        calls = []
        for i in range(plan.first, plan.warmup, plan.step):
            like = plan.workload.request(i)
            request = TraceRequest(None, like.input_len or 16, like.output_len)
            index = WARMUP_INDEX + i
            body = plan.template.body(index, prompts.build(index, request), request.output_len)
            calls.append(self._send(index, request, body, None))
        return [record.error for record in await asyncio.gather(*calls) if record.error]

    # ---- sending ---------------------------------------------------------------------------------------

    async def _open_loop(self, start: float) -> None:
        """Send each request when it is due, whether or not earlier ones are complete."""
        assert self.plan.due is not None
        tasks = []
        try:
            for due in (start + self.plan.due).tolist():
                entry = self.bodies.take()
                assert entry is not None
                wait = due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(self._send_and_record(*entry, due)))
                await asyncio.sleep(0)  # the request is sent before the next body is built
                self.bodies.refill()
            await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def _closed_loop(self, start: float) -> None:
        """Let each client send its next request when its last one is complete."""
        end = start + self.plan.duration if self.plan.duration is not None else float("inf")

        async def client() -> None:
            while time.perf_counter() < end and (entry := self.bodies.take()) is not None:
                await self._send_and_record(*entry, None)
                self.bodies.refill()

        tasks = [asyncio.create_task(client()) for _ in range(self.plan.clients)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def _send_and_record(self, index: int, request: TraceRequest, body: bytes, due: float | None) -> None:
        record = await self._send(index, request, body, due)
        self.result.records.append(record)
        if record.interrupted:
            raise asyncio.CancelledError

    async def _send(self, index: int, request: TraceRequest, body: bytes, due: float | None) -> RequestRecord:
        """Send one request and return its record. Does not raise: the record says why a request failed."""
        record = RequestRecord(index, request.output_len, request.input_len, due)
        reader = StreamReader(record, self.plan.template.ignore_eos, self.plan.keep_text)
        await exchange(self.http, self.plan.template.path, body, record, reader, self.plan.timeout)
        return record

    # ---- what is measured beside the requests ----------------------------------------------------------

    async def _measure_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_INTERVAL)
            self.result.lags.append(time.perf_counter() - before - LAG_INTERVAL)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL)
            self._report_new()

    def _report_new(self) -> None:
        """Report the requests that have ended since the last report."""
        new, self.reported = self.result.records[self.reported :], len(self.result.records)
        failed = sum(bool(record.error) for record in new)
        self.pipe.send(("progress", (len(new), failed, sum(record.output_len for record in new))))


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run_worker(plan: Plan, pipe: Pipe) -> None:
    """Run one client process. Ctrl-C reaches the main process only, which then stops this one over the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_file_limit(MAX_FILES)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        asyncio.run(Worker(plan, pipe).main())
