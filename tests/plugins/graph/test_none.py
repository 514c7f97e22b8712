"""Tests of graph=none: no buckets, and errors for calls that need a recording."""

from __future__ import annotations

import pytest
import torch

from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.graph.replaying.buckets import GraphKey


def test_none_records_nothing() -> None:
    """The runner of graph=none has no buckets, and raises ValueError if it is asked to record or replay."""
    manager = PluginManager.load()
    config = compose(manager, ["graph=none"])
    runner = manager.build("graph", config.graph, device=torch.device("cpu"))
    assert tuple(runner.buckets(256)) == ()
    runner.capture((), lambda key: None, lambda inputs: torch.empty(0))
    assert runner.pick(1, 1, True) is None
    with pytest.raises(ValueError, match="graph=none records nothing"):
        runner.capture([GraphKey(1)], lambda key: None, lambda inputs: torch.empty(0))
    with pytest.raises(ValueError, match="no recording of"):
        runner.run(GraphKey(1))
    runner.close()
