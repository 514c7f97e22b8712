"""How a graph runner comes to wrap the runner of steps, also one of a plugin for 0.2, and what it starts early."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.options.compose import compose
from minisgl.plugin_manager.encoding import decode_config, early_functions, early_of, encode_config, started_early
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.graph.replaying import EARLY, BucketRunner
from minisgl.plugins.graph.replaying.piecewise import PiecewiseAttention


class Old:
    """A graph runner as plugins for 0.2 have it. It passes what it does not define on to another runner."""

    def __init__(self, other: Any):
        self.other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


class Slotted:
    __slots__ = ()


@dataclass
class Options:
    made: Any = None
    early_context: ClassVar[str] = f"{__name__}.note"

    def build(self) -> Any:
        return self.made


noted: list[Any] = []


@contextmanager
def note(device: str, tp: int) -> Iterator[None]:
    noted.append((device, tp))
    yield
    noted.append("left")


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return a manager that accepts runners for 0.2, as it does once it has a plugin that is not built in."""
    made = PluginManager.load()
    made._use_external()
    return made


def test_a_runner_for_0_2_wraps_too(manager: PluginManager, caplog: pytest.LogCaptureFixture) -> None:
    """The wrapper calls the runner itself, not the one to which it passes calls on."""
    inner = manager.build("graph", manager.make("graph", "simulated"), device=torch.device("cpu"))
    caplog.clear()
    old = Old(inner)
    with caplog.at_level(logging.WARNING):
        made = manager.build("graph", Options(old), device=torch.device("cpu"))
    assert made is old
    assert made.wrap.__self__ is old
    assert made.buckets(2) == inner.buckets(2)
    assert "derive Old from BucketRunner" in caplog.text
    assert "derive" not in "".join(record.message for record in caplog.records[1:])


def test_a_runner_that_can_not_be_changed_is_refused(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match="Slotted has no method wrap: derive Slotted from BucketRunner"):
        manager.build("graph", Options(Slotted()), device=torch.device("cpu"))


def test_what_a_runner_lacks_is_an_error() -> None:
    """A method that a runner does not define is not taken for one that has no buckets."""
    for call in (lambda r: r.buckets(4), lambda r: r.pick(1, 1, True), lambda r: r.capture((), None, None)):
        with pytest.raises(NotImplementedError):
            call(BucketRunner())


def test_attention_is_wrapped_only_for_pieces(manager: PluginManager) -> None:
    backend: Any = object()
    options = manager.make("graph", "simulated")
    for max_tokens, wrapped in ((0, False), (32, True)):
        options.max_tokens = max_tokens
        runner = manager.build("graph", options, device=torch.device("cpu"))
        assert isinstance(runner.wrap_attention(backend, 100), PiecewiseAttention) == wrapped


def test_early_functions_reach_a_rank(manager: PluginManager) -> None:
    """A rank's process learns their names from the encoded options, before it loads a plugin."""
    data = encode_config(compose(manager, ["graph=cuda"]), manager)
    assert early_of(data) == [EARLY]
    assert decode_config(data, manager).graph == manager.make("graph", "cuda")
    assert early_of(encode_config(compose(manager, ["graph=none"]), manager)) == []


def test_what_started_early_ends_after_the_body() -> None:
    noted.clear()
    with started_early(early_functions(Options(), object()), "cuda", 2):
        assert noted == [("cuda", 2)]
    assert noted == [("cuda", 2), "left"]
