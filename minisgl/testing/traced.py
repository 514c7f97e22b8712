"""A `Drive` whose events are recorded in a trace file, for people to look at and for the trace checker.

The format and the content of a trace are described in `minisgl.trace`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pluggy

from minisgl import hooks
from minisgl.config import Config
from minisgl.core import EngineSpec
from minisgl.plugins.cache.base import PrefixCache
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.testing.drive import Drive

__all__ = ["traced"]


@contextmanager
def traced(
    path: str | Path, spec: EngineSpec, cache: PrefixCache, policy: SchedulerPolicy, **options: Any
) -> Iterator[Drive]:
    """Yield a `Drive` that records its trace to ``path``. ``options`` are `Drive`'s.

    The file is complete when the context ends, also if the context ends with an exception.
    """
    known = {key: value for key, value in options.items() if key in Config.__dataclass_fields__}
    config = Config(trace=str(path), model="simulated", page_size=spec.page_size, **known)
    recorder = import_module("minisgl.plugins.observer.trace").minisgl_observer(config, spec)
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(recorder)
    try:
        yield Drive(spec, cache, policy, observers=manager.hook, **options)
    finally:
        recorder.minisgl_closed()
