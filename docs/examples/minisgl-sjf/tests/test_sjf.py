"""The policy against the public conformance kit, and its own behaviour."""

from __future__ import annotations

import pytest
from minisgl_sjf import ShortestFirst, Sjf

from minisgl.core import SamplingParams
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler import SchedulerPolicy
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.policy import PolicyConformance
from minisgl.testing.small import SPEC


class TestShortestFirst(PolicyConformance):
    """The conformance kit for policies, run on `ShortestFirst`."""

    def make(self) -> SchedulerPolicy:
        return ShortestFirst(patience=8)


@pytest.mark.parametrize(("patience", "first"), [(8, 2), (1, 1)])
def test_short_prompt_first(patience: int, first: int) -> None:
    """With patience 8 the short prompt, which arrived second, is answered first; with patience 1 it is not."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    jobs = [Job(1, [1] * 40, params), Job(2, [2] * 3, params)]
    cache = make_plugin("cache", "naive", page_size=SPEC.page_size)
    report = Drive(SPEC, cache, ShortestFirst(patience), max_prefill_tokens=8).run(jobs)
    assert min(report.first_token, key=report.first_token.__getitem__) == first


def test_entry_point() -> None:
    """minisgl finds the installed package without `plugins=`."""
    manager = PluginManager.load(light=True)
    assert isinstance(manager.build("scheduler", manager.make("scheduler", "sjf")), ShortestFirst)


def test_patience_zero() -> None:
    """`scheduler.patience=0` is refused."""
    with pytest.raises(ValueError, match=r"scheduler\.patience=0 must be at least 1"):
        Sjf(patience=0)
