"""The comparison of a rank's options and plugins with rank 0's.

Each rank that torchrun starts reads its own command line and its own files. The ranks must compute the same, so what an
engine reads must be equal on all of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import BUILT_IN, PluginManager

OWN_OPTIONS = ("server", "kv_events", "multi_node", "trace", "log_level", "log_format", "plugins")
"""Options that a rank may have of its own: they do not change what an engine computes. Plugins are compared by their
files' content."""


def check_same_options(own: bytes, rank0: bytes) -> None:
    """Raise `ConfigError` if an option that an engine reads differs from rank 0's.

    Both arguments are configs, encoded by `encode_config`.
    """
    own_values, rank0_values = _values(own), _values(rank0)
    different = [key for key in own_values | rank0_values if own_values.get(key) != rank0_values.get(key)]
    if different:
        texts = [f"{key}={own_values.get(key)} (rank 0: {rank0_values.get(key)})" for key in different]
        raise ConfigError(f"This rank has other options than rank 0: {', '.join(texts)}. Start all ranks alike.")


def check_same_plugins(own: dict[str, str], rank0: dict[str, str]) -> None:
    """Raise `ConfigError` if a plugin's file differs from rank 0's. The arguments are those of `plugin_hashes`."""
    different = sorted(name for name in own | rank0 if own.get(name) != rank0.get(name))
    if different:
        raise ConfigError(
            f"These plugins differ from rank 0's: {', '.join(different)}. Use the same files on all nodes."
        )


def plugin_hashes(manager: PluginManager) -> dict[str, str]:
    """Return the SHA-256 values of the built-in plugins, loaded or not, by module, and of the other ones by file."""
    spec = importlib.util.find_spec(BUILT_IN)
    root = Path((spec and spec.origin) or "").parent
    modules = {".".join((BUILT_IN, *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    own = {plugin.path.name: plugin.sha256 for plugin in manager.plugins if plugin.source != "built-in"}
    return own | {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in modules.items()}


def _values(encoded: bytes) -> dict[str, Any]:
    """Return the options of an encoded config that an engine reads, by key."""
    _, plain, groups = msgspec.msgpack.decode(encoded)
    values = {key: value for key, value in plain.items() if key not in OWN_OPTIONS}
    for group, (name, options, *_) in groups.items():
        values |= {group: name} | {f"{group}.{key}": value for key, value in options.items()}
    return values
