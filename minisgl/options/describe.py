"""Descriptions of the options: key, type, default and help text, read from the dataclasses.

``--help``, the reference page of the docs, shell completion and the suggestions in error messages use this module. It
knows the dataclasses, the groups of the plugin manager and the names of the files in ``conf/``. It composes no config.
"""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from minisgl.config import GROUPS, Config

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

PRESETS = ("experiment", "stage")
"""The folders of ``conf/`` whose files (presets) set several options at once."""
SECTIONS = {"server": "Server", "kv_events": "KV events", "multi_node": "Several nodes"}
"""The options of `Config` that contain further ones, and the titles of their sections in ``--help`` and the docs."""


@dataclass(frozen=True)
class Option:
    """One option of the command line, written ``key=value``. A ``required`` option has no default."""

    key: str
    type: Any
    default: Any
    help: str
    required: bool = False

    @property
    def type_name(self) -> str:
        """The type as it is written in the dataclass, such as ``int | None``."""
        return self.type.__name__ if isinstance(self.type, type) else str(self.type).replace("typing.", "")

    @property
    def default_text(self) -> str:
        """The default value as it is written on the command line, or ``(required)``."""
        return "(required)" if self.required else as_word(self.default)

    @property
    def optional(self) -> bool:
        return type(None) in typing.get_args(self.type)

    @property
    def is_text(self) -> bool:
        """Whether the value is a string (or null). Such a value needs no quotes except the shell's own."""
        kinds = set(typing.get_args(self.type)) - {type(None)} if typing.get_args(self.type) else {self.type}
        return kinds == {str}


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
        if isinstance(kind, type) and is_dataclass(kind):
            found += options_of(kind, f"{prefix}{f.name}.")
            continue
        required = f.default is MISSING and f.default_factory is MISSING
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        found.append(Option(prefix + f.name, kind, default, field_docs(schema).get(f.name, ""), required))
    return found


def core_options(kind: type[Config] = Config) -> list[Option]:
    """Return the options of `Config` itself, without the groups; or of a dataclass that adds options to it."""
    return [option for option in options_of(kind) if option.key not in GROUPS]


def sections(options: Sequence[Option]) -> dict[str, list[Option]]:
    """Return the options of `Config` by section: those without a dot in "Top level", then those of `SECTIONS`."""
    found: dict[str, list[Option]] = {title: [] for title in ("Top level", *SECTIONS.values())}
    for option in options:
        head, dot, _ = option.key.partition(".")
        found[SECTIONS[head] if dot else "Top level"].append(option)
    return found


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


def doc_of(schema: type) -> str:
    """Return the dataclass's docstring as one line, or an empty text if the dataclass has none.

    The signature that ``@dataclass`` sets as a missing docstring does not count.
    """
    doc = schema.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{schema.__name__}(") else " ".join(inspect.cleandoc(doc).split())


@cache
def field_docs(schema: type) -> dict[str, str]:
    """Return the help text of each field: the string literal on the line below the field in the source code."""
    module = sys.modules.get(schema.__module__)
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__[1:-1]):
        found |= field_docs(base)
    try:
        tree: ast.AST = ast.parse(Path(getattr(module, "__file__", None) or "").read_text("utf-8"))
    except (OSError, SyntaxError):
        return found
    for part in schema.__qualname__.split("."):
        named = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == part]
        if not named:
            return found
        tree = named[0]
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for field, below in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = " ".join(inspect.cleandoc(str(below.value.value)).split())
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


# ---- help --------------------------------------------------------------------------------------------

USAGE = """\
usage: python -m minisgl [option=value ...]      (or: minisgl [option=value ...])

Serves a model over an OpenAI-compatible HTTP API.

  python -m minisgl                              serves tutor, the embedded model, on port 1919
  python -m minisgl model=tutor tp=2 cache=radix
  python -m minisgl plugins=my_cache.py cache=mine cache.max_nodes=100

  --help                        this text; with plugins=… the options of your plugins too
  --cfg job                     print the composed options and exit
  --version                     print the version and exit
  --shell-completion SHELL      print the completion script; for bash, zsh and fish:
                                eval "$(minisgl --shell-completion bash)"

"""


def help_text(manager: PluginManager, kind: type[Config] = Config, usage: str = USAGE) -> str:
    """Return the text of ``--help``: every option with its type, default and help, and the choices of every group.

    ``kind`` is the dataclass of the options, and ``usage`` the beginning of the text.
    """
    manager.load_all()
    parts = [usage]
    for title, options in sections(core_options(kind)).items():
        parts += ["Options\n" if title == "Top level" else f"\n{title}\n", *map(_entry, options)]
    for group in GROUPS:
        parts.append(f"\n{group}=NAME (default: {default_choice(group)})\n")
        for name, schema in sorted(manager.configs[group].items()):
            parts.append(_wrap(f"  {group}={name}", doc_of(schema)))
            parts += [_entry(o, indent=4) for o in options_of(schema, f"{group}.")]
    for preset in PRESETS:
        parts.append(f"\n{preset}=NAME (a preset of several options; other arguments override it)\n")
        parts += [_wrap(f"  {preset}={name}", text) for name, text in presets(preset).items()]
    return "".join(parts)


def _entry(option: Option, indent: int = 2) -> str:
    text = f"[{option.type_name}] {option.help}".rstrip()
    return _wrap(f"{' ' * indent}{option.key}={option.default_text}", text)


def _wrap(head: str, text: str, column: int = 36, width: int = 110) -> str:
    if not text:
        return head + "\n"
    margin = " " * column
    body = fill(text.replace("``", ""), width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
    return f"{head:<{column}}{body.lstrip()}\n" if len(head) < column else f"{head}\n{body}\n"
