"""Several ranks in one process, each a thread, linked by a real communicator. For tests of communicators and models.

If ranks are not done after a time limit, `run_ranks` reports a deadlock and the line at which each rank waits. The
limit begins when all ranks are linked, because linking can take long on a busy machine.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from minisgl.cluster.process import free_port
from minisgl.config import Config
from minisgl.distributed import Communicator
from minisgl.engine.build import build_engine
from minisgl.engine.engine import TorchEngine
from minisgl.engine.ranks import Peers, follow
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.serving import scaled_timeout

__all__ = ["LINKING_SECONDS", "Deadlock", "leader_engine", "run_ranks"]

T = TypeVar("T")
LINKING_SECONDS = 120.0
"""Seconds within which all ranks must have built their communicators."""
Make = Callable[[int, int, str], Communicator]
"""Builds the communicator of one rank. Called as ``make(rank, size, address)``."""


class Deadlock(AssertionError):  # noqa: N818 - the standard term
    """Ranks are not done after the time limit. ``locations``: rank → the line of code at which the rank waits."""

    def __init__(self, locations: dict[int, str], seconds: float):
        self.locations = locations
        waits = "; ".join(f"rank {rank} at {location}" for rank, location in sorted(locations.items()))
        super().__init__(f"deadlock: ranks are not done after {seconds:.0f} s and wait for each other: {waits}")


def run_ranks(
    size: int,
    work: Callable[[Communicator], T],
    manager: PluginManager | None = None,
    *,
    make: Make | None = None,
    limit: float = 120.0,
) -> list[T]:
    """Run ``work(communicator)`` in ``size`` threads, one for each rank, and return the results in rank order.

    ``make`` builds the communicators; by default they are those of ``communicator=torch`` over gloo. ``manager`` loads
    this default. Raise the error of the rank that failed first. Raise `Deadlock` if a rank is not done ``limit``
    seconds after all ranks were linked; on an overloaded machine the limit is longer (`scaled_timeout`).
    """
    address = f"127.0.0.1:{free_port()}"
    link = make or _gloo(manager or PluginManager.load())
    links: dict[int, Communicator] = {}
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    ended = threading.Event()

    def run(rank: int) -> None:
        try:
            links[rank] = link(rank, size, address)
            results[rank] = work(links[rank])
            ended.wait()  # close only when all ranks are done: to a rank that still waits, this rank would look dead
            links[rank].close(abort=len(results) < size)
        except BaseException as error:  # raised again below, in the caller's thread
            # Ignore the errors of ranks that are aborted below. A stored error keeps its frames, which keep the rank's
            # connections open, and other ranks wait until these connections close.
            if not ended.is_set() or len(results) == size:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    seconds = LINKING_SECONDS
    _wait(seconds, lambda: bool(errors) or len(links) == size)
    if len(links) == size:
        seconds = scaled_timeout(limit)
        _wait(seconds, lambda: bool(errors) or len(results) == size)
    alive = {rank: thread for rank, thread in enumerate(threads) if rank not in results and thread.is_alive()}
    waiting = {rank: _location(thread) for rank, thread in alive.items()}
    deadlock = Deadlock(waiting, seconds) if waiting and not errors else None
    ended.set()
    for rank in links.keys() - results.keys():
        # Abort this rank's communicator, so that ranks that wait for it fail. The abort runs in a thread, because
        # gloo's abort blocks until the rank has left its collective.
        threading.Thread(target=links[rank].close, kwargs={"abort": True}, daemon=True).start()
    _wait(2.0 if waiting or errors else seconds, lambda: not any(thread.is_alive() for thread in threads))
    if deadlock is not None:
        raise deadlock
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def _wait(seconds: float, until: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.005)


def _gloo(manager: PluginManager) -> Make:
    def make(rank: int, size: int, address: str) -> Communicator:
        options = {"rank": rank, "size": size, "address": address, "device": torch.device("cpu")}
        made: Communicator = manager.build("communicator", manager.make("communicator", "torch"), **options)
        return made

    return make


def _location(thread: threading.Thread) -> str:
    """Return the innermost line that a thread executes outside torch, other packages and Python's library."""
    top = sys._current_frames().get(thread.ident or 0)
    libraries = (str(Path(torch.__file__).parent), str(Path(threading.__file__).parent))
    for frame in reversed(traceback.extract_stack(top)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(libraries):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})"
    return "an unknown line"


@contextmanager
def leader_engine(config: Config, manager: PluginManager) -> Iterator[TorchEngine]:
    """Build an engine of ``config.tp`` ranks, each a thread, and yield rank 0's. At the end, close all of them.

    Raises AssertionError if another rank failed, or does not end within a minute.
    """
    address, threads = f"127.0.0.1:{free_port()}", torch.get_num_threads()
    steps: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(config.tp - 1)]
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            engine = build_engine(config, manager, rank, config.tp, address)
            follow(engine, steps[rank - 1].get)
            engine.close()
        except BaseException as error:  # raised below, in the caller's thread
            failed.append(error)

    class Threads(Peers):
        def send(self, data: bytes | None) -> None:
            for each in steps:
                each.put(data)

        def end(self) -> None:
            self.send(None)

    followers = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, config.tp)]
    for follower in followers:
        follower.start()
    leader = build_engine(config, manager, 0, config.tp, address)
    leader.peers = Threads()
    try:
        yield leader
    finally:
        leader.close()
        for follower in followers:
            follower.join(60)
        torch.set_num_threads(threads)
    assert not failed, f"a rank failed: {failed[0]!r}"
    assert not any(follower.is_alive() for follower in followers), "a rank did not end"
