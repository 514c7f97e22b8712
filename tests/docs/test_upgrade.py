"""docs/upgrade-0.2.md names every rename that the program itself knows, and only modules that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.chapters.lab.grader import old_names
from minisgl.plugins.command.advice import RENAMED_OPTIONS
from minisgl.plugins.external import since_0_2

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / old_names.UPGRADE_PAGE).read_text(encoding="utf-8")


def known() -> Iterator[tuple[str, ...]]:
    """Yield the cells that the page must have side by side: (place, old name, new name), or (old name, new name)."""
    yield from RENAMED_OPTIONS.items()
    yield from old_names.RENAMED_METRICS.items()
    tables = (since_0_2.RENAMED_HOOK_ARGUMENTS, old_names.RENAMED_ATTRIBUTES)
    for place, names in (entry for table in tables for entry in table.items()):
        yield from ((place, old, new) for old, new in names.items())
    for names in old_names.RENAMED_IMPORTS.values():
        yield from names.items()


@pytest.mark.parametrize("cells", sorted(set(known()), key=str), ids=" ".join)
def test_a_rename_is_on_the_page(cells: tuple[str, ...]) -> None:
    assert "| " + " | ".join(f"`{cell}`" for cell in cells) in PAGE


def test_the_new_modules_exist() -> None:
    rows = PAGE.partition("\n## Modules\n")[2].partition("\n## ")[0]
    modules = re.findall(r"^\| `[\w.…]+` \| `([\w.]+)` \|", rows, re.MULTILINE)
    assert len(modules) > 40
    moved = {
        "minisgl.course": "chapters",
        "minisgl.engine.kv_sizing": "minisgl.engine.setup",
        "minisgl.engine.simulated_graph": "plugins.graph.replaying.simulated_graph",
        "minisgl.plugin_manager.call_counts": "plugins.external.call_counts",
        "minisgl.options.completion": "plugins.command.completion",
        "minisgl.options.reference": "chapters.site.reference",
        "minisgl.server.responses": "minisgl.server.generate",
        "minisgl.server.worker_process": "minisgl.server.worker_pool",
    }
    for before, since_0_3 in moved.items():
        modules = [re.sub(rf"^{re.escape(before)}\b", since_0_3, module) for module in modules]
    paths = [ROOT / module.replace(".", "/") for module in modules]
    assert [path for path in paths if not path.is_dir() and not path.with_suffix(".py").exists()] == []
