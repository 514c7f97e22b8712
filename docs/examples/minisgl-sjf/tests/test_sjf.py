"""The public kit, and what this policy is for."""

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
    def make(self) -> SchedulerPolicy:
        return ShortestFirst(patience=8)


@pytest.mark.parametrize(("patience", "first"), [(8, 2), (1, 1)])
def test_the_short_prompt_is_answered_first_where_it_may_pass(patience: int, first: int) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    jobs = [Job(1, [1] * 40, params), Job(2, [2] * 3, params)]
    cache = make_plugin("cache", "naive", page_size=SPEC.page_size)
    report = Drive(SPEC, cache, ShortestFirst(patience), max_prefill_tokens=8).run(jobs)
    assert min(report.first_token, key=report.first_token.__getitem__) == first


def test_it_is_found_once_it_is_installed() -> None:
    manager = PluginManager.load(light=True)
    assert isinstance(manager.build("scheduler", manager.make("scheduler", "sjf")), ShortestFirst)


def test_no_patience_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.patience=0 must be at least 1"):
        Sjf(patience=0)
