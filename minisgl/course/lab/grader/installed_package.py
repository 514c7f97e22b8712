"""Looks at an installed plugin package from its clean environment, and prints JSON.

Arguments of ``python -m minisgl.course.lab.grader.installed_package``:

found DIST          the plugins that the distribution adds
kit GROUP NAME      the conformance kit on the plugin, with its default options
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from typing import Any

from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager

KITS = {
    "attention": ("attention", "AttentionConformance"),
    "cache": ("cache", "CacheConformance"),
    "scheduler": ("policy", "PolicyConformance"),
    "moe": ("moe", "MoeConformance"),
    "graph": ("graph", "GraphConformance"),
    "communicator": ("communicator", "CommunicatorConformance"),
}
"""Group → module of `minisgl.testing` and its kit. Models and observers have no kit that fits every one."""


def found(dist: str) -> dict[str, Any]:
    """Its plugins, or why there is none."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    entries = importlib.metadata.entry_points(group="minisgl")
    mine = [entry for entry in entries if entry.dist is not None and plain(entry.dist.name) == plain(dist)]
    if not mine:
        groups = sorted({e.group for e in importlib.metadata.distribution(dist).entry_points})
        return {"plugins": [], "groups": groups}
    try:
        manager = PluginManager.load(light=True)
        if any("minisgl_models" in plugin.hooks for plugin in manager.plugins if plugin.source == "entry point"):
            manager = PluginManager.load()
            manager.models()  # two plugins may claim one name
    except ConfigError as error:
        return {"error": str(error)}
    modules = {entry.module for entry in mine}
    return {
        "plugins": [
            {
                "module": plugin.name,
                "path": str(plugin.path),
                "sha256": plugin.sha256,
                "hooks": plugin.hooks,
                "options": [(group, name) for group, name, _ in plugin.options],
            }
            for plugin in manager.plugins
            if plugin.name in modules
        ]
    }


def kit(group: str, name: str) -> dict[str, Any]:
    """The group's kit on the plugin's choice ``name``."""
    import torch

    module, kind = KITS[group]
    base = getattr(__import__(f"minisgl.testing.{module}", fromlist=[kind]), kind)
    manager, cpu = PluginManager.load(), torch.device("cpu")
    on_device = ("attention", "moe", "graph")

    class Kit(base):  # type: ignore[misc,valid-type]
        lru = False  # of caches: it may evict in any order that keeps prefixes whole

        def make(self, *args: Any) -> Any:
            more: dict[str, Any] = {"device": cpu} if group in on_device else {}
            if group == "cache":
                more = {"page_size": args[0]}
            if group == "communicator":
                more = {"rank": args[0], "size": args[1], "address": args[2], "device": cpu}
            return manager.build(group, manager.make(group, name), **more)

    passed: list[str] = []
    for test in sorted(each for each in dir(Kit) if each.startswith("test_")):
        try:
            getattr(Kit(), test)()
        except Exception as error:  # whatever it raises is what its users would see
            said = " ".join(f"{type(error).__name__}: {error}".split())
            return {"passed": passed, "failed": test, "said": said}
        passed.append(test)
    return {"passed": passed}


def main(words: list[str]) -> None:
    """One question, one line of JSON behind whatever the plugin prints."""
    told = found(words[1]) if words[0] == "found" else kit(words[1], words[2])
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
