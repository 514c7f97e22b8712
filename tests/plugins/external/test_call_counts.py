"""Call counts of a plugin's hooks, of its objects' methods and of its models. Built-in plugins are not counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.external.call_counts import Calls, count_method_calls, counting_subclass

FILE = '''
from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Mine:
    """Mine."""

    def build(self):
        return Slotted()


class Slotted:
    __slots__ = ("plans",)

    def __init__(self):
        self.plans = 0

    def plan(self, waiting, running, budget):
        self.plans += 1
        return self.helped()

    def helped(self):
        return Plan([])


class Model:
    def forward(self, x):
        return x


class Watching:
    @hookimpl
    def minisgl_pages_evicted(self, pages):
        pass


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine


@hookimpl
def minisgl_models():
    return {"MineForCausalLM": Model}
'''


@pytest.fixture
def manager(tmp_path: Path) -> PluginManager:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return PluginManager.load([str(path)])


def test_calls_of_user_plugin_are_counted(manager: PluginManager) -> None:
    policy = manager.build("scheduler", manager.make("scheduler", "mine"))
    for _ in range(3):
        policy.plan([], [], None)
    assert policy.plans == 3
    model = manager.models()["MineForCausalLM"]
    assert model().forward(7) == 7
    manager.hook.minisgl_pages_evicted(step=0, pages=())
    (plugin,) = (plugin for plugin in manager.plugins if plugin.source == "file")
    calls = {call: times for name, path, sha256, call, times in manager.call_counts()}
    assert {(name, path, sha) for name, path, sha, *_ in manager.call_counts()} == {
        (plugin.name, str(plugin.path), plugin.sha256)
    }
    assert calls == {
        "build": 1, "plan": 3, "helped": 3, "minisgl_models": 1, "forward": 1, "minisgl_pages_evicted": 1,
    }  # fmt: skip


def test_built_in_plugins_are_not_wrapped() -> None:
    manager = PluginManager.load()
    policy = manager.build("scheduler", manager.make("scheduler", "mixed"))
    assert type(policy).__mro__[1] is object
    assert manager.call_counts() == []


def test_two_managers_count_separately(manager: PluginManager) -> None:
    other = PluginManager.load(manager.user_plugins)
    for one, times in ((manager, 2), (other, 5)):
        policy = one.build("scheduler", one.make("scheduler", "mine"))
        for _ in range(times):
            policy.plan([], [], None)
    assert [{c: n for *_, c, n in one.call_counts()}["plan"] for one in (manager, other)] == [2, 5]


def test_object_with_fixed_class_is_not_counted() -> None:
    """An object whose class can't be replaced is left as it is, and private methods are not counted."""
    calls = Calls()
    count_method_calls((1, 2), calls)
    assert not calls
    kind = counting_subclass(type("Kind", (), {"act": lambda self: 3, "_own": lambda self: 4}), calls)
    assert kind().act() == 3
    assert kind()._own() == 4
    assert calls == {"act": 1}
