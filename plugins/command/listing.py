"""Lists of the options of all groups and of the presets in ``conf/``: for help, completion, advice and the docs."""

from __future__ import annotations

from enum import Enum
from functools import cache
from importlib import resources
from typing import Any

from minisgl.config import GROUPS
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import Option, choice_of, options_of


def group_options(manager: PluginManager) -> dict[str, Option]:
    """Return the options of all choices of all groups, by key.

    If two choices of a group have an option with the same key, the result has the option of the first choice.
    """
    found: dict[str, Option] = {}
    manager.load_all()
    for group in GROUPS:
        for schema in manager.configs[group].values():
            for option in options_of(schema, f"{group}."):
                found.setdefault(option.key, option)
    return found


@cache
def presets(kind: str) -> dict[str, str]:
    """Return the presets in ``conf/<kind>/``: name → description, which is the comment at the top of its file."""
    folder = resources.files("minisgl.conf") / kind
    found = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name) if folder.is_dir() else []:
        if file.name.endswith(".yaml"):
            comment = []
            for line in file.read_text("utf-8").splitlines():
                if not line.startswith("#"):
                    break
                if not line.startswith("# @package"):
                    comment.append(line.lstrip("# "))
            found[file.name.removesuffix(".yaml")] = " ".join(comment)
    return found


def default_choice(group: str) -> str:
    """Return the default choice of a group, as set in ``config.yaml`` or ``cluster.yaml`` in ``conf/``."""
    return choice_of(group, ())


def type_name(option: Option) -> str:
    """Return the type of an option as it is written in the dataclass, such as ``int | None``."""
    return option.type.__name__ if isinstance(option.type, type) else str(option.type).replace("typing.", "")


def default_text(option: Option) -> str:
    """Return the default value of an option as it is written on the command line, or ``(required)``."""
    return "(required)" if option.required else as_word(option.default)


def as_word(value: Any) -> str:
    """Return a value as it is written on the command line: ``null``, ``true``, ``[a,b]``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(as_word(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_word(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Enum):
        return value.name
    return "''" if value == "" else str(value)
