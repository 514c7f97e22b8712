"""`python -m minisgl.plugins [file.py ...] [--json]`: lists the loaded plugins, their files, hooks and options.

The table has all plugins, or, if the command line names some, all but the built-in ones.

The program loads the plugins as a scheduler process does, models included, and builds no part of an engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from minisgl.config import ConfigError
from minisgl.options.compose import plain_errors, split_plugins
from minisgl.plugin_manager.manager import Plugin, PluginManager
from minisgl.plugins.command.describe import options_of
from minisgl.plugins.command.listing import default_text

USAGE = "usage: python -m minisgl.plugins [my_plugin.py | module | plugins=my_plugin.py ...] [--json]"


def main(argv: Sequence[str]) -> None:
    """Print the plugins as a table, or as JSON with ``--json``. Exit with status 2 if a plugin can't be loaded."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return
    with plain_errors("minisgl.plugins"):
        named, words = split_plugins([word for word in argv if word != "--json"])
        for word in words:
            if word.startswith("-"):
                raise ConfigError(f"{word}: there is no such flag. {USAGE}")
        manager = PluginManager.load()
        manager.load_all()
        for word in (*named, *words):
            manager.add(word)
        manager.models()  # raises an error if two plugins have the same architecture name
        rows = [_describe(plugin) for plugin in manager.plugins]
    if "--json" in argv:
        print(json.dumps(rows, indent=2))
        return
    others = [row for row in rows if row["source"] != "built-in"]
    _print(others if others and (named or words) else rows)


def _describe(plugin: Plugin) -> dict[str, Any]:
    return {
        "plugin": plugin.name,
        "source": plugin.source,
        "path": str(plugin.path),
        "sha256": plugin.sha256,
        "hooks": list(plugin.hooks),
        "options": {
            f"{group}={name}": {o.key: default_text(o) for o in options_of(schema, f"{group}.")}
            for group, name, schema in plugin.options
        },
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("file", "sha256", "hooks", "adds"):
        table.add_column(title, overflow="fold", no_wrap=title == "sha256")
    for row in rows:
        adds = []
        for choice, options in row["options"].items():
            adds += [choice, *(f"  {key}={default}" for key, default in options.items())]
        path = Path(row["path"])
        shown = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
        if row["source"] == "built-in" and not path.is_relative_to(Path.cwd()):
            shown = row["plugin"]
        if row["source"] != "built-in":
            shown += f"\n({row['source']})"
        hooks = "\n".join(name.removeprefix("minisgl_") for name in row["hooks"] if name != "minisgl_configs")
        table.add_row(shown, row["sha256"][:12], hooks, "\n".join(adds))
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
