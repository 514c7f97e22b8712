"""Builds rank 0's scheduler from a `Config`: with the cache, policy, proposer and observers that the options name."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from minisgl.core import Engine, EngineSpec
from minisgl.scheduler.base import DraftProposer, Speculation
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.starvation import StarvationGuard

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.plugin_manager.manager import PluginManager


ADAPTIVE = "minisgl.plugins.speculation.adaptive"
"""The module that decides how many drafts each request gets. It is imported by name, as the built-in plugins are, and
only where a proposer makes drafts."""


class RankZeroEngine(Engine, Protocol):
    """The engine of rank 0, which also knows the end-of-sequence token ids in the model's configuration."""

    eos_ids: frozenset[int]


def build_scheduler(
    config: Config,
    manager: PluginManager,
    engine: RankZeroEngine,
    clock: Callable[[], float] = time.monotonic,
    *,
    eos_ids: Collection[int] = (),
    proposer: DraftProposer | None = None,
    adapt_drafts: bool = True,
) -> Scheduler:
    """Build rank 0's scheduler for ``engine``, with the cache, the policy and the proposer that ``config`` names.

    The observers of ``manager`` receive the scheduler's events until ``manager.close()`` is called. ``clock`` returns
    seconds. ``eos_ids`` are added to those of the engine: the end-of-sequence id of the tokenizer. A benchmark may pass
    another ``proposer``, and turn off the adaptation of the number of drafts.
    """
    manager.observe(config, engine.spec)
    return Scheduler(
        engine,
        manager.build("cache", config.cache, page_size=engine.spec.page_size),
        StarvationGuard(manager.build("scheduler", config.scheduler), config.starvation_steps),
        max_prefill_tokens=config.max_prefill_tokens,
        overlap=config.overlap,
        eos_ids=engine.eos_ids | frozenset(eos_ids),
        seed=config.seed,
        observers=manager.hook,
        clock=clock,
        speculation=build_speculation(
            proposer or manager.build("speculation", config.speculation, spec=engine.spec),
            engine.spec,
            config.max_draft_tokens,
            clock,
            adapt_drafts,
            config.verification_rounds,
        ),
    )


def build_speculation(
    proposer: DraftProposer | None,
    spec: EngineSpec,
    max_draft_tokens: int = 512,
    clock: Callable[[], float] = time.monotonic,
    adapt: bool = True,
    rounds: int = 1,
) -> Speculation | None:
    """Return what gives a scheduler the drafts of ``proposer``; None if it makes none.

    With ``adapt``, the number of drafts follows how many were accepted, and how long steps take.
    """
    if proposer is None:
        return None
    if not proposer.max_drafts:
        proposer.close()
        return None
    made: Speculation = import_module(ADAPTIVE).AdaptiveSpeculation(
        proposer, spec, max_draft_tokens, clock, adapt, rounds
    )
    return made
