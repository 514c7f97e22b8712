"""The arguments of a command line as people write them: flags, and ``key=value`` with text that needs no quotes.

`minisgl.options.compose` asks this module for both. Without it, arguments are in Hydra's own syntax, and the only flag
is ``--version``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType

from minisgl.config import GROUPS, Config, ConfigError
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import PRESETS, Option, choice_of, core_options, is_preset, options_of

FLAGS = MappingProxyType(
    {
        "--complete": "completion",
        "--shell-completion": "completion",
        "-sc": "completion",
        "--help": "help",
        "-h": "help",
        "help": "help",
        "--cfg": "print_config",
        "-c": "print_config",
    }
)
"""Flag of the command line → the module beside this one whose ``run(words, kind, usage)`` handles it."""


def run_flag(words: Sequence[str], kind: type[Config], usage: str) -> bool:
    """Run the program for the flag among the arguments ``words``. Return whether there is one of `FLAGS`.

    ``kind`` is the dataclass of the options, and ``usage`` the beginning of the text of ``--help``.
    """
    for flag, name in FLAGS.items():
        if flag in words and (flag != "--complete" or words[0] == flag):
            module = f"minisgl.plugins.command.{name}"
            if not exists(module):
                raise ConfigError(f"{flag} needs the file plugins/command/{name}.py, which is missing.")
            import_module(module, flag).run(list(words), kind, usage)
            return True
    return False


def in_hydra_syntax(manager: PluginManager, word: str, words: Sequence[str], kind: type[Config]) -> str:
    """Return one of the arguments ``words`` in Hydra's syntax. Raise `ConfigError` if there is no such option."""
    key, equals, value = word.partition("=")
    key = key.lstrip("+")
    group, dot, _ = key.partition(".")
    name = value.strip("'\"")
    if equals and (key in GROUPS or (key in PRESETS and (name == "null" or is_preset(key, name)))):
        return f"{key}='{name}'" if name != "null" else f"{key}=null"
    if group in GROUPS and dot:
        known = options_of(manager.schema(group, choice_of(group, words)), f"{group}.")
    else:
        known = core_options(kind)
    option = next((option for option in known if option.key == key), None)
    if equals and option is not None:
        return f"{key}={_literal(option, value)}"
    if equals and dot and group in GROUPS:  # Hydra refuses it, once all choices are known
        return f"{key}={value}"
    from minisgl.plugins.command.advice import refused  # not needed for a right argument

    raise ConfigError(refused(manager, word, kind))


def _literal(option: Option, value: str) -> str:
    """Return an option's value in Hydra's syntax.

    The value of a text option is quoted, so a user can write a path with blanks, brackets or ``=`` without quotes.
    """
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    if not option.is_text or quoted or "${" in value or (option.optional and value == "null"):
        return value
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"
