"""Construction of an engine from a `Config`, and the loop with which other ranks replay the steps of rank 0.

Every process that computes calls `build_engine`: the process of ``LLM`` and each rank process of a server. Sockets,
pipes and the supervision of processes are left to the callers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from minisgl.config import GROUPS
from minisgl.core import Engine, EngineSpec, Step, StepResult, TokenMasks
from minisgl.plugin_manager.early import early_functions, started_early

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine
    from minisgl.plugin_manager.manager import PluginManager

MAX_IN_FLIGHT = 2
"""The largest number of steps in flight: launched by the engine, with a result that the caller has not read yet."""


def build_engine(
    config: Config,
    manager: PluginManager,
    rank: int = 0,
    size: int = 1,
    address: str = "",
    *,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> TorchEngine:
    """Build the engine of one tensor-parallel rank: model, weights, KV pool, attention, communicator, graphs.

    Also compute the steps with which the graph runner warms up, so that no request waits for a compiler.

    ``size`` is the number of ranks. ``address`` is ``host:port`` of rank 0's rendezvous; at ``size`` 1 it may be empty.
    With several ranks the call blocks until all ranks have connected, so the caller must start the follower processes
    before or while it builds rank 0. ``local_size`` of the ranks are on this machine, where this rank has the number
    ``local_rank``; by default all of them are. With several ranks on a machine, torch uses at most
    cores // ``local_size`` threads (at least 1) in this process. On GPUs, a rank uses GPU number ``local_rank``, and
    makes it the current CUDA device of this thread.

    Raises `ConfigError` if options contradict each other, the model or the machine.
    """
    parts = [getattr(config, group) for group in GROUPS]
    with started_early(early_functions(*parts), config.device, config.tp):
        from minisgl.engine.engine import TorchEngine

        local_rank = rank if local_rank is None else local_rank
        local_size = size if local_size is None else local_size
        if local_size > 1:
            _limit_threads(local_size)
        if local_rank > 0:
            _set_current_device(config, local_rank, local_size)
        engine = TorchEngine(
            config, manager, rank=rank, size=size, address=address, local_rank=local_rank, local_size=local_size
        )
        drafting = manager.name_of("speculation", config.speculation) not in ("none", "null")
        engine.warm_up(config.max_prefill_tokens, drafting=drafting, rounds=config.verification_rounds)
        engine.kernels.ready()
        return engine


def prepare_device(config: Config, local_rank: int, local_size: int) -> None:
    """Import torch, check that this machine has the device of the rank, and initialise CUDA if it is a GPU.

    This can take seconds in which no other thread of this process runs. A rank calls it before it sends heartbeats.
    Raises `ConfigError` if this machine has too few GPUs.
    """
    import torch

    from minisgl.engine.setup import resolve_device

    if resolve_device(config, local_rank, local_size).type == "cuda":
        torch.cuda.init()


def _set_current_device(config: Config, local_rank: int, local_size: int) -> None:
    """Make this rank's GPU the current CUDA device of this thread.

    Kernels and pinned-memory allocations that name no device use the current one, which is the first GPU by default.
    """
    import torch

    from minisgl.engine.setup import resolve_device

    if (device := resolve_device(config, local_rank, local_size)).type == "cuda":
        torch.cuda.set_device(device)


def _limit_threads(size: int) -> None:
    """Limit torch's threads to this rank's share of the cores: at most ``cores // size``, at least 1.

    If each of ``size`` ranks on one machine used all cores, the ranks' threads would compete and slow each other down.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // size)))


class LeaderEngine:
    """Engine of rank 0 that sends each step to the follower ranks before it launches the step itself.

    ``send(data)`` must deliver the encoded step to every follower, in order and without loss (promise 7). The class
    implements the `Engine` protocol, so the scheduler does not need to know the number of ranks. SGLang broadcasts the
    requests instead (`recv_requests`), and every rank schedules.
    """

    def __init__(self, engine: TorchEngine, send: Callable[[bytes], None]):
        self._engine, self._send = engine, send
        self.spec: EngineSpec = engine.spec
        self.eos_ids: frozenset[int] = engine.eos_ids

    def launch(self, step: Step) -> None:
        """Send the encoded step to the followers, then launch the step on rank 0's engine."""
        self._send(step.encode())
        self._engine.launch(step)

    def sample(self, masks: TokenMasks) -> None:
        """Start the sampling of a step with ``late_sampling`` on rank 0's engine.

        The masks are not sent: the followers receive the tokens that rank 0 samples.
        """
        self._engine.sample(masks)

    def result(self) -> StepResult:
        """Return the result of the oldest step in flight, as rank 0's engine reports it."""
        return self._engine.result()

    def close(self) -> None:
        """Close rank 0's engine. Each follower ends when its ``receive`` (see `follow`) returns None."""
        self._engine.close()


def follow(engine: Engine, receive: Callable[[], bytes | None]) -> None:
    """Launch rank 0's steps on this rank's engine until ``receive`` returns None. Ranks above 0 call it.

    ``receive`` blocks until the next encoded step arrives. With `MAX_IN_FLIGHT` steps in flight, the function waits for
    the result of the oldest one before it launches another step. So a follower runs no further ahead of its device than
    rank 0 does. The caller closes the engine. Raises `EngineDeadError` if the device or another rank fails.
    """
    in_flight = 0
    while (data := receive()) is not None:
        if in_flight == MAX_IN_FLIGHT:
            engine.result()
            in_flight -= 1
        engine.launch(Step.decode(data))
        in_flight += 1
    for _ in range(in_flight):
        engine.result()
