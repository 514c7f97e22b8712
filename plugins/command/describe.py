"""Descriptions of the options: key, type and default, read from the dataclasses, and the choices in ``conf/``.

`arguments` reads a command line with them, and the other modules of this folder list and explain them. This module
composes no config.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import resources
from typing import Any

from minisgl.config import GROUPS, Config

PRESETS = ("exact", "experiment", "stage")
"""The folders of ``conf/`` whose files (presets) set several options at once."""


@dataclass(frozen=True)
class Option:
    """One option of the command line, written ``key=value``. A ``required`` option has no default."""

    key: str
    type: Any
    default: Any
    schema: type  # the dataclass that has the option as a field
    required: bool = False

    @property
    def optional(self) -> bool:
        return type(None) in typing.get_args(self.type)

    @property
    def is_text(self) -> bool:
        """Whether the value is a string (or null). Such a value needs no quotes except the shell's own."""
        kinds = set(typing.get_args(self.type)) - {type(None)} if typing.get_args(self.type) else {self.type}
        return kinds == {str}


def options_of(schema: type, prefix: str = "") -> list[Option]:
    """Return the options that a dataclass defines: its fields, and the fields of nested dataclasses.

    ``prefix`` is put before each key. It is empty or ends with a dot.
    """
    try:
        hints = typing.get_type_hints(schema)
    except Exception:  # an annotation that can't be resolved at run time: OmegaConf reports the field later
        hints = {}
    found = []
    for f in fields(schema):
        kind = hints.get(f.name, f.type)
        required = f.default is MISSING and f.default_factory is MISSING
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        nested = type(default) if is_dataclass(default) else kind  # a section of `Config` is a plugin's dataclass
        if isinstance(nested, type) and is_dataclass(nested):
            found += options_of(nested, f"{prefix}{f.name}.")
            continue
        found.append(Option(prefix + f.name, kind, default, schema, required))
    return found


def core_options(kind: type[Config] = Config) -> list[Option]:
    """Return the options of `Config` itself, without the groups; or of a dataclass that adds options to it."""
    return [option for option in options_of(kind) if option.key not in GROUPS]


def is_preset(kind: str, name: str) -> bool:
    """Return whether there is a preset ``kind=name``: a file of this name in ``conf/<kind>/``."""
    return (resources.files("minisgl.conf") / kind / f"{name}.yaml").is_file()


def choice_of(group: str, words: Sequence[str]) -> str:
    """Return the part of a group that the arguments of a command line select, themselves or by a preset."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    files = [f"{preset}/{given[preset]}.yaml" for preset in reversed(PRESETS) if preset in given]
    files += ["config.yaml", "cluster.yaml"]
    found = given.get(group) or next(filter(None, (_default(file, group, f"override /{group}") for file in files)), "")
    name = found.strip("'\"")
    return _default(f"{group}/{name}.yaml") or name  # a file such as conf/scheduler/mixed_lpm.yaml selects mixed


def _default(file: str, *keys: str) -> str:
    """Return what a file in ``conf/`` has below ``defaults:`` for one of the keys, or as its first name, if any."""
    path = resources.files("minisgl.conf") / file
    entries = path.read_text("utf-8").partition("defaults:\n")[2].splitlines() if path.is_file() else []
    for entry in entries:
        key, colon, name = entry.partition("#")[0].strip(" -").removeprefix("optional ").partition(": ")
        if key in keys or not (keys or colon):
            return name or key
    return ""
