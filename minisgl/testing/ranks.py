"""Several ranks in one process, each a thread: for tests of communicators, and of what uses them.

Ranks that wait for each other for ever are told from slow ones by a limit, and named with where each of them stands.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from minisgl.distributed import Communicator
from minisgl.host import Host
from minisgl.utils.ports import free_port

__all__ = ["Deadlock", "run_ranks"]

T = TypeVar("T")
Make = Callable[[int, int, str], Communicator]
"""Called as ``make(rank, size, address)``."""


class Deadlock(AssertionError):  # noqa: N818 - the word for it
    """Ranks wait for each other. ``places``: rank → the line of code where it waits."""

    def __init__(self, places: dict[int, str], seconds: float):
        self.places = places
        stand = "; ".join(f"rank {rank} at {place}" for rank, place in sorted(places.items()))
        super().__init__(f"the ranks wait for each other for ever (nothing came for {seconds:g} s): {stand}")


def run_ranks(
    size: int,
    work: Callable[[Communicator], T],
    host: Host | None = None,
    *,
    make: Make | None = None,
    limit: float = 120.0,
) -> list[T]:
    """``work(communicator)`` in ``size`` threads, one for each rank; the results in rank order.

    ``make`` links them, by default ``communicator=torch`` over gloo. Raises what the first rank to fail raised, and
    `Deadlock` where ranks are not done after ``limit`` seconds.
    """
    address = f"127.0.0.1:{free_port()}"
    link = make or _gloo(host or Host.load())
    links: dict[int, Communicator] = {}
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            links[rank] = link(rank, size, address)
            results[rank] = work(links[rank])
            links[rank].close()
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        while thread.is_alive() and not errors and time.monotonic() < deadline:
            thread.join(0.02)
    waiting = {rank: _place(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    if waiting:
        _join(threads, 1.0)  # where one failed, the others may be about to
        for one in list(links.values()):
            one.close(abort=True)  # sends home who waits
        _join(threads, 1.0)
    if errors:
        raise errors[0]
    if waiting:
        raise Deadlock(waiting, limit)
    return [results[rank] for rank in range(size)]


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _gloo(host: Host) -> Make:
    def make(rank: int, size: int, address: str) -> Communicator:
        options = {"rank": rank, "size": size, "address": address, "device": torch.device("cpu")}
        made: Communicator = host.build("communicator", host.make("communicator", "torch"), **options)
        return made

    return make


def _place(thread: threading.Thread) -> str:
    """The innermost line that is not torch's or Python's own."""
    top = sys._current_frames().get(thread.ident or 0)
    theirs = (str(Path(torch.__file__).parent), str(Path(threading.__file__).parent))
    for frame in reversed(traceback.extract_stack(top)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(theirs):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})"
    return "an unknown place"
