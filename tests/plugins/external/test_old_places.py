"""Names that moved in 0.3: a plugin that imports them from their old places works, and a warning has the new ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLUGIN = """
from minisgl import hookimpl
from minisgl.kvcache import Key, MatchResult, PrefixCache
from minisgl.layers import MoELayer
from minisgl.models.converter import Quantization
from minisgl.moe import MoeBackend
from minisgl.scheduler import DraftProposer
from minisgl.scheduler.base import DraftProposer as Same, mask_of
assert Same is DraftProposer

@hookimpl
def minisgl_closed():
    pass
"""
LOAD = """
import logging, sys
logging.basicConfig()
import minisgl.layers  # before the plugin; the plugin itself imports minisgl.scheduler
from minisgl.plugin_manager.manager import PluginManager
assert "minisgl.scheduler" not in sys.modules
PluginManager.load([sys.argv[1]])
import minisgl.scheduler
assert not hasattr(minisgl.scheduler, "Unknown")
"""


def test_a_plugin_finds_moved_names(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text(PLUGIN, "utf-8")
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for place, name in (
        ("minisgl.plugins.cache.base", "PrefixCache"),
        ("minisgl.plugins.models.experts", "MoELayer"),
        ("minisgl.plugins.moe", "MoeBackend"),
        ("minisgl.plugins.quantization.base", "Quantization"),
        ("minisgl.plugins.speculation", "DraftProposer"),
        ("minisgl.plugins.constraint.base", "mask_of"),
    ):
        assert f"has moved: write `from {place} import {name}`" in done.stderr
