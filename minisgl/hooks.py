"""Every hook of minisgl on one screen. A plugin implements some of them with ``@hookimpl``.

*Factories* are called once, at start, in each scheduler process; the first result that is not None wins. A factory
gets its group's config object and returns None when that object's type is not its own. *Observers* are called in
rank 0's scheduler process (or in ``LLM``'s), every one of them, once a step or a request and never per layer; what
they are given is theirs to read, not to change.

Hooks are functions of a module, or methods of a class in it: each host then makes one object of the class, without
arguments, so that what an observer counts belongs to one engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch

    from minisgl.attention import AttentionBackend
    from minisgl.config import Config
    from minisgl.core import I32, EngineSpec, Req, Step, StepResult
    from minisgl.distributed import Communicator
    from minisgl.engine.graph import GraphRunner
    from minisgl.kvcache import PrefixCache
    from minisgl.moe import MoeBackend
    from minisgl.scheduler import SchedulerPolicy

PROJECT = "minisgl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


def printed() -> bool:
    """Whether each hook call is printed: ``MINISGL_TRACE_HOOKS=1``."""
    return os.environ.get("MINISGL_TRACE_HOOKS", "0") not in ("", "0")


# ---- options: called in every process, before the config is composed or decoded ------------------


@hookspec
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Yield ``(group, name, dataclass)``: selected by ``group=name``; its fields are its options."""
    raise NotImplementedError


# ---- factories: called once, at start, in each scheduler process --------------------------------


@hookspec(firstresult=True)
def minisgl_attention(
    config: Any, device: torch.device, build: Callable[[str], AttentionBackend]
) -> AttentionBackend | None:
    """Make the attention backend. ``build(name)`` makes another by its name, for one that wraps others."""


@hookspec(firstresult=True)
def minisgl_cache(config: Any, page_size: int) -> PrefixCache | None:
    """Make the prefix cache. Called in rank 0's process only: the other ranks follow its steps."""


@hookspec(firstresult=True)
def minisgl_scheduler(config: Any) -> SchedulerPolicy | None:
    """Make the scheduling policy. Called in rank 0's process only."""


@hookspec(firstresult=True)
def minisgl_moe(config: Any, device: torch.device, build: Callable[[str], MoeBackend]) -> MoeBackend | None:
    """Make what multiplies tokens with their experts; ``build`` as above. Called for models that have experts."""


@hookspec(firstresult=True)
def minisgl_graph(config: Any, device: torch.device, build: Callable[[str], GraphRunner]) -> GraphRunner | None:
    """Make what records a decode step once and replays it; ``build`` as above."""


@hookspec(firstresult=True)
def minisgl_communicator(
    config: Any, rank: int, size: int, address: str, device: torch.device, build: Callable[[str], Communicator]
) -> Communicator | None:
    """Make the link between the ranks; ``address`` is ``host:port`` of rank 0's rendezvous; ``build`` as above. Also
    called at size 1."""


@hookspec
def minisgl_models() -> Mapping[str, type]:
    """Map architecture names, as ``config.json`` has them, to model classes. Every plugin's mapping counts."""
    raise NotImplementedError


@hookspec
def minisgl_observer(config: Config, spec: EngineSpec) -> object | None:
    """Make an observer that needs options, or the engine's sizes: an object with the hooks below as methods, which
    listens until `minisgl_closed`. None: it is off, and costs nothing. Every plugin is asked, just before the scheduler
    is built, in rank 0's process or ``LLM``'s. A module that has this hook makes its objects itself: no host does."""


# ---- observers: a request ------------------------------------------------------------------------


@hookspec
def minisgl_request_added(req: Req, now: float) -> None:
    """A request was accepted and waits. ``now`` is the scheduler's clock in seconds, as in every hook below."""


@hookspec
def minisgl_prefix_matched(req: Req, pages: I32, step: int) -> None:
    """A request takes a slot; the cache held ``pages`` of its prefix, which are now locked for it."""


@hookspec
def minisgl_request_retracted(req: Req, step: int) -> None:
    """A request lost its slot and pages to older ones and waits again; its output goes on where it was."""


@hookspec
def minisgl_request_finished(req: Req, now: float) -> None:
    """A request ended; ``req.reason`` says how. Its slot and pages have been given back."""


# ---- observers: pages, once a step ------------------------------------------------------------------


@hookspec
def minisgl_pages_allocated(step: int, owners: I32, pages: I32) -> None:
    """``owners[i]`` (a request's uid) took ``pages[i]`` for the step being built."""


@hookspec
def minisgl_pages_cached(step: int, req: Req, pages: I32, start: int, cached_pages: I32) -> None:
    """The cache now owns ``pages``, which were the request's. ``cached_pages`` are the
    cache's pages for the request's pages from number ``start`` on, all locked for it. Where they are not ``pages``, the
    request's own pages are given back."""


@hookspec
def minisgl_pages_evicted(step: int, pages: I32) -> None:
    """The cache gave up ``pages``; they are free."""


@hookspec
def minisgl_pages_freed(step: int, owner: int, pages: I32) -> None:
    """The request ``owner`` gave back ``pages``; they are free once every step up to ``step`` was read."""


@hookspec
def minisgl_pages_counted(step: int, free: int, cached: int, evictable: int, retiring: int) -> None:
    """The scheduler has done a turn, and ``step`` would be next: how many pages are free, the cache's, of those in
    nobody's use, and retiring. The others are owned by requests."""


# ---- observers: a step -------------------------------------------------------------------------------


@hookspec
def minisgl_batch_planned(step: int, rows: Sequence[tuple[int, int]]) -> None:
    """A plan was accepted: (uid, tokens) of each row. Next its requests take slots and pages; then
    `minisgl_batch_scheduled` follows."""


@hookspec
def minisgl_batch_scheduled(step: Step, reqs: Sequence[Req], now: float) -> None:
    """A step is about to be launched; ``reqs[i]`` is the request of row i."""


@hookspec
def minisgl_step_finished(result: StepResult, reqs: Sequence[Req | None], now: float) -> None:
    """A step's result was read. ``reqs[i]`` gained the row's token, or is None where the token was discarded."""


# ---- observers: what they counted -------------------------------------------------------------------------


@hookspec
def minisgl_metrics() -> str:
    """Somebody reads ``/metrics``: return what was counted so far, in Prometheus' text format."""
    raise NotImplementedError


# ---- observers: the end ------------------------------------------------------------------------------------


@hookspec
def minisgl_closed() -> None:
    """The scheduler has ended, well or badly, and nothing more will be heard: write out and close what is open."""
