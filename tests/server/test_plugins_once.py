"""Every process of a server loads the plugins once, from the same path."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx

from minisgl.testing.serving import Server

PLUGIN = '''
import os
from dataclasses import dataclass
from pathlib import Path

from minisgl import hookimpl
from minisgl.plugins.cache.naive import NaiveCache
from minisgl.plugins.speculation import DraftProposer

@dataclass
class Mine:
    """Caches nothing."""

    def build(self):
        return NaiveCache()

def note(what):
    with Path(__file__).with_suffix(".log").open("a") as log:
        log.write(f"{what} {os.getpid()} {__file__}\\n")

note("import")

@hookimpl
def minisgl_configs():
    note("configs")
    yield "cache", "mine", Mine
    yield "speculation", "nothing", Nothing

@dataclass
class Nothing:
    """Drafts nothing."""

    def build(self):
        return NoDrafts()

class NoDrafts(DraftProposer):
    max_drafts = 1

    def propose(self, reqs, positions, limits):
        return [()] * len(reqs)

    def close(self):
        note("close")
'''


def test_plugins_load_once_in_a_process(tiny: Path, tmp_path: Path) -> None:
    """The command line hands its plugin manager to the server: it does not load the plugins a second time."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    with Server(f"model={tiny}", f"plugins={plugin}", "cache=mine", "speculation=nothing", "num_pages=64") as server:
        httpx.get(f"{server.url}/health").raise_for_status()
    lines = [line.split() for line in plugin.with_suffix(".log").read_text().splitlines()]
    assert {path for _, _, path in lines} == {str(plugin)}
    loads = Counter((what, pid) for what, pid, _ in lines)
    assert set(loads.values()) == {1}, loads
    assert len({pid for _, pid in loads}) >= 2  # the API server and the rank
    assert [what for what, _ in loads].count("close") == 1, "the scheduler closes the proposer at its end"
