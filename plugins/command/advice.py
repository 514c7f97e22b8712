"""Advice for a wrong command line: which argument is wrong, why, and what was meant.

`minisgl.options.compose` refuses arguments that are no options, and passes on errors of Hydra. This module explains
both. It is loaded when there is something to explain.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from minisgl.config import GROUPS, Config
from minisgl.options.compose import first_line
from minisgl.plugin_manager.discovery import near
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import PRESETS, core_options, options_of
from minisgl.plugins.command.listing import group_options, presets


def refused(manager: PluginManager, word: str, kind: type[Config]) -> str:
    """Return why an argument of the command line is none, and what to write instead."""
    if word.startswith("-"):
        bare = word.lstrip("-")
        hint = f" Options are written without dashes: {bare}" if "=" in bare else " Options are written key=value."
        return f"{word}: there is no such flag.{hint}"
    if word.startswith("~"):
        return f"{word}: options can't be removed. Set the one you mean, as in key=value."
    key, equals, value = word.partition("=")
    if not equals:
        hint = next((f" Did you mean {group}={word}?" for group in GROUPS if manager.find(group, word)), "")
        hint = hint or (f" To load a plugin: plugins={word}" if word.endswith(".py") else "")
        return f"{word}: write key=value.{hint}"
    key = key.lstrip("+")
    if key in PRESETS:
        return f"{word}: there is no such {key}{near(value, presets(key))} Known: {', '.join(presets(key))}."
    known = [*(option.key for option in core_options(kind)), *GROUPS, *PRESETS, *group_options(manager)]
    tails = [k for k in known if k.rpartition(".")[2] == key]
    section = key.partition(".")[0]
    sections = {k.partition(".")[0] for k in known if "." in k} - {*GROUPS}
    if section in sections and (key == section or not tails):
        known = [k for k in known if k.startswith(f"{section}.")]
        guess = _near_in(key, known) + f" It has: {', '.join(known)}."
    else:
        guess = f". Did you mean {' or '.join(tails[:3])}?" if tails else near(key, known)
    return f"There is no option {key!r}{guess} See: python -m minisgl --help"


def explain(error: Exception, manager: PluginManager, words: Sequence[str]) -> str:
    """Return what an error of Hydra or OmegaConf means, and the argument among ``words`` that caused it."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import (
        ConfigAttributeError,
        ConfigKeyError,
        InterpolationResolutionError,
        MissingMandatoryValue,
        OmegaConfBaseException,
        ValidationError,
    )

    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if not isinstance(cause, OmegaConfBaseException):
        line = _first_line(error)
        if line.startswith("Ambiguous value"):
            word = line.rpartition(" ")[2].strip("'")
            line = f"{word}: give one value. A list is written in brackets: '{word.replace('=', '=[', 1)}]'"
        elif isinstance(error, OverrideParseException):
            line = (
                f'{error.override}: this can\'t be read: {line}. Quote the value: "{_quoted_example(error.override)}"'
            )
        return f"{line}."
    key, schema = str(cause.full_key or ""), cause.object_type
    word = next((w.lstrip("+") for w in words if w.lstrip("+").partition("=")[0] == key), key)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(schema, type) and is_dataclass(schema):
        return _unknown_in(manager, key, schema)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no default. Set it: {key}=…"
    if isinstance(cause, ValidationError):
        return f"{word}: {key} must be {_expected(schema, key) or _first_line(cause)}."
    if isinstance(cause, InterpolationResolutionError):
        return f"{word}: {_first_line(cause)}."
    return f"{word}: {_first_line(cause)}" if word else _first_line(cause)


def _near_in(key: str, own: Sequence[str]) -> str:
    """Return a suggestion like `near` does, for keys that differ only in the part after the last dot."""
    prefix, dot, last = key.rpartition(".")
    return near(last, [k.rpartition(".")[2] for k in own]).replace("mean ", f"mean {prefix}{dot}")


def _unknown_in(manager: PluginManager, key: str, schema: type) -> str:
    group, _, _ = key.partition(".")
    manager.load_all(group)
    own = [option.key for option in options_of(schema, key.rpartition(".")[0] + ".")]
    others = [
        f"{group}={name}"
        for name, other in manager.configs.get(group, {}).items()
        if key in [option.key for option in options_of(other, f"{group}.")]
    ]
    chosen = next((name for name, other in manager.configs.get(group, {}).items() if other is schema), schema.__name__)
    if others:
        hint = f". It is an option of {' and '.join(others)}; did you mean to choose that?"
    else:
        hint = _near_in(key, own) + (f" It has: {', '.join(own)}." if own else " It has no options.")
    return f"There is no option {key!r} in {group}={chosen}{hint}"


def _expected(schema: Any, key: str) -> str:
    """Return a description of the values that a field accepts, such as "a whole number". Empty if it is not known."""
    if not (isinstance(schema, type) and is_dataclass(schema)):
        return ""
    name = key.rpartition(".")[2]
    if name not in [f.name for f in fields(schema)]:
        return ""
    hint = typing.get_type_hints(schema)[name]
    kinds = [k for k in (typing.get_args(hint) or (hint,)) if k is not type(None)]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        expected = "one of " + ", ".join(kinds[0].__members__)
    elif len(kinds) == 1 and kinds[0] in words and typing.get_origin(hint) not in (list, dict):
        expected = words[kinds[0]]
    else:
        return f"of type {hint}".replace("typing.", "")
    return expected + (" or null" if type(None) in typing.get_args(hint) else "")


def _quoted_example(word: str) -> str:
    key, _, value = word.partition("=")
    return f"{key}='{value}'"


def _first_line(error: BaseException) -> str:
    return first_line(error).rstrip(".")
