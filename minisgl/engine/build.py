"""From a `Config` to a running engine; and how the other ranks follow rank 0.

What every process that computes calls, whether it is ``LLM``'s or a server's: it knows which hooks to ask and in
which order, and leaves sockets, pipes and the watching of processes to its callers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from minisgl.core import Engine, EngineSpec, Step, StepResult

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine
    from minisgl.plugin_manager.manager import PluginManager

MAX_UNREAD = 2
"""Steps that an engine may have launched whose results nobody has read yet (DESIGN 5, the stream rule)."""


def build_engine(
    config: Config, manager: PluginManager, rank: int = 0, size: int = 1, address: str = ""
) -> TorchEngine:
    """The engine of one tensor-parallel rank: model, weights, KV pool, attention, communicator, graphs.

    ``address`` is ``host:port`` of rank 0's rendezvous; at ``size`` 1 it may be empty. With several ranks the call
    returns when all of them have come, so start the followers first (or at the same time). On a CPU this process
    then computes with its share of the cores; on GPUs a rank above 0 makes its own this thread's current one. Raises
    `ConfigError` where options contradict each other or the machine.
    """
    from minisgl.engine.engine import TorchEngine

    if size > 1:
        _share_cores(size)
    if rank > 0:
        _take_device(config, rank)
    return TorchEngine(config, manager, rank=rank, size=size, address=address)


def _take_device(config: Config, rank: int) -> None:
    """What is launched, or pinned, without a word about the device would take memory of the first GPU."""
    import torch

    from minisgl.engine.setup import pick_device

    if (device := pick_device(config, rank)).type == "cuda":
        torch.cuda.set_device(device)


def _share_cores(size: int) -> None:
    """Ranks on one CPU that each use all cores spend their time waiting for each other's threads."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // size)))


class LeaderEngine:
    """Rank 0's engine where others follow: each step goes to them, encoded, before it is launched here.

    ``send`` hands the bytes to every follower, in order and without loss (promise 7). It is an `Engine`, so the
    scheduler does not know how many ranks there are.
    """

    def __init__(self, engine: TorchEngine, send: Callable[[bytes], None]):
        self._engine, self._send = engine, send
        self.spec: EngineSpec = engine.spec
        self.eos_ids: frozenset[int] = engine.eos_ids

    def launch(self, step: Step) -> None:
        self._send(step.encode())
        self._engine.launch(step)

    def result(self) -> StepResult:
        return self._engine.result()

    def close(self) -> None:
        """Close rank 0's engine. The followers end when their ``receive`` says so."""
        self._engine.close()


def follow(engine: Engine, receive: Callable[[], bytes | None]) -> None:
    """Replay rank 0's steps until ``receive`` returns None. For ranks above 0.

    ``receive`` blocks for the next encoded step. At most `MAX_UNREAD` steps are in flight: the oldest result is
    waited for before another step is launched, so a follower never runs further ahead than rank 0 may. The caller
    closes the engine. Raises `EngineDeadError` where the device or a peer fails.
    """
    unread = 0
    while (data := receive()) is not None:
        if unread == MAX_UNREAD:
            engine.result()
            unread -= 1
        engine.launch(Step.decode(data))
        unread += 1
    for _ in range(unread):
        engine.result()
