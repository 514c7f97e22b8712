"""Several ranks in one process, each a thread: for tests of communicators, and of what uses them.

Ranks that wait for each other for ever are told from slow ones by a limit, and named with where each of them stands.
The limit is for what they do, not for how they find each other, which a busy machine can make long.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from minisgl.distributed import Communicator
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.serving import patience
from minisgl.utils.ports import free_port

__all__ = ["LINKING_SECONDS", "Deadlock", "run_ranks"]

T = TypeVar("T")
LINKING_SECONDS = 120.0
"""How long ranks may take to find each other."""
Make = Callable[[int, int, str], Communicator]
"""Called as ``make(rank, size, address)``."""


class Deadlock(AssertionError):  # noqa: N818 - the word for it
    """Ranks wait for each other. ``places``: rank → the line of code where it waits."""

    def __init__(self, places: dict[int, str], seconds: float):
        self.places = places
        stand = "; ".join(f"rank {rank} at {place}" for rank, place in sorted(places.items()))
        super().__init__(f"the ranks wait for each other for ever (nothing came for {seconds:.0f} s): {stand}")


def run_ranks(
    size: int,
    work: Callable[[Communicator], T],
    manager: PluginManager | None = None,
    *,
    make: Make | None = None,
    limit: float = 120.0,
) -> list[T]:
    """``work(communicator)`` in ``size`` threads, one for each rank; the results in rank order.

    ``make`` links them, by default ``communicator=torch`` over gloo. Raises what the first rank to fail raised, and
    `Deadlock` where ranks are not done ``limit`` seconds after all were linked, on a machine with a core to spare.
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
            ended.wait()  # a rank that closed its link now would look dead to one that waits for it
            links[rank].close(abort=len(results) < size)
        except BaseException as error:  # raised again below, in the caller's thread
            # Not where a rank is sent home: its frames would hold its connections open, and others wait for those.
            if not ended.is_set() or len(results) == size:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    seconds = LINKING_SECONDS
    _wait(seconds, lambda: bool(errors) or len(links) == size)
    if len(links) == size:
        seconds = patience(limit)
        _wait(seconds, lambda: bool(errors) or len(results) == size)
    waiting = {rank: _place(thread) for rank, thread in enumerate(threads) if rank not in results and thread.is_alive()}
    deadlock = Deadlock(waiting, seconds) if waiting and not errors else None
    ended.set()
    for rank in links.keys() - results.keys():
        # Sends home who waits for it. In a thread, since gloo's own abort waits for its rank to leave a collective.
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


def _place(thread: threading.Thread) -> str:
    """The innermost line that is not torch's or Python's own."""
    top = sys._current_frames().get(thread.ident or 0)
    theirs = (str(Path(torch.__file__).parent), str(Path(threading.__file__).parent))
    for frame in reversed(traceback.extract_stack(top)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(theirs):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})"
    return "an unknown place"
