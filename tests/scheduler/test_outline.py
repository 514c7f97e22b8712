"""The outline of a turn in the docstring of `Scheduler.step` names functions that exist."""

from __future__ import annotations

import re

from minisgl.core import Engine
from minisgl.scheduler import scheduler
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.planner import Planner

OWNERS = {
    "CacheManager": CacheManager,
    "Engine": Engine,
    "Planner": Planner,
    "Scheduler": scheduler.Scheduler,
}


def test_outline_names_functions_that_exist() -> None:
    text = scheduler.Scheduler.step.__doc__ or ""
    steps = re.findall(r"^\s+(\d)\. ", text, re.MULTILINE)
    assert steps == [str(n) for n in range(1, len(steps) + 1)] and len(steps) == 8
    names = [name for name in re.findall(r"(?<!`)`([\w.]+)`(?!`)", text) if "_" in name or name[0].isupper()]
    assert len(names) >= 15
    for name in names:
        owner, _, function = name.rpartition(".")
        found = hasattr(OWNERS[owner or "Scheduler"], function) or (not owner and hasattr(scheduler, function))
        assert found, f"{name} in the outline of step() does not exist"
