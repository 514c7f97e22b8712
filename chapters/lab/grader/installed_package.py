"""Inspects an installed plugin package from inside its clean environment, and prints the result as JSON.

``python -m minisgl.chapters.lab.grader.installed_package`` has two commands:

found DIST          list the plugins that the distribution adds to minisgl
kit GROUP NAME      run the conformance kit of the group on the plugin, with its default options
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
"""Group → (module of `minisgl.testing`, class of the kit). Models and observers have no kit that fits all of them."""


def found(dist: str) -> dict[str, Any]:
    """Return the plugins of the distribution, or the reason why minisgl finds none."""

    def normalized(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    entries = importlib.metadata.entry_points(group="minisgl")
    mine = [entry for entry in entries if entry.dist is not None and normalized(entry.dist.name) == normalized(dist)]
    if not mine:
        groups = sorted({e.group for e in importlib.metadata.distribution(dist).entry_points})
        return {"plugins": [], "groups": groups}
    try:
        manager = PluginManager.load(light=True)
        if any("minisgl_models" in plugin.hooks for plugin in manager.plugins if plugin.source == "entry point"):
            manager = PluginManager.load()
            manager.models()  # raises ConfigError if two plugins have a model of one name
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
    """Run the group's kit on the plugin ``name``. Return the tests that passed and the first that failed."""
    import torch

    module, kind = KITS[group]
    base = getattr(__import__(f"minisgl.testing.{module}", fromlist=[kind]), kind)
    manager, cpu = PluginManager.load(), torch.device("cpu")
    on_device = ("attention", "moe", "graph")

    class Kit(base):  # type: ignore[misc,valid-type]
        lru = False  # for the cache kit: any order of eviction that keeps prefixes whole is accepted

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
        except Exception as error:  # any exception is a failed test
            message = " ".join(f"{type(error).__name__}: {error}".split())
            return {"passed": passed, "failed": test, "message": message}
        passed.append(test)
    return {"passed": passed}


def main(words: list[str]) -> None:
    """Run one command and print its result as the last line, after anything that the plugin prints."""
    result = found(words[1]) if words[0] == "found" else kit(words[1], words[2])
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
