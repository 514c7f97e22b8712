"""``--help``: every option with its type, default and help text, and the choices of every group.

The help texts are the docstrings in the dataclasses. The reference page of the docs uses them too.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import fill

from minisgl.config import GROUPS, Config
from minisgl.options.compose import split_plugins
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import PRESETS, Option, core_options, options_of
from minisgl.plugins.command.listing import default_choice, default_text, presets, type_name

SECTIONS = {"server": "Server", "kv_events": "KV events", "multi_node": "Several nodes"}
"""The options of `Config` that contain further ones, and the titles of their sections in ``--help`` and the docs."""

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


def run(words: Sequence[str], kind: type[Config], usage: str) -> None:
    """Print the text of ``--help``, with the options of the plugins that the command line names."""
    print(help_text(PluginManager.load(split_plugins(words)[0], light=True), kind, usage or USAGE), end="")


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
    text = f"[{type_name(option)}] {help_of(option)}".rstrip()
    return _wrap(f"{' ' * indent}{option.key}={default_text(option)}", text)


def _wrap(head: str, text: str, column: int = 36, width: int = 110) -> str:
    if not text:
        return head + "\n"
    margin = " " * column
    body = fill(text.replace("``", ""), width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
    return f"{head:<{column}}{body.lstrip()}\n" if len(head) < column else f"{head}\n{body}\n"


def sections(options: Sequence[Option]) -> dict[str, list[Option]]:
    """Return the options of `Config` by section: those without a dot in "Top level", then those of `SECTIONS`."""
    found: dict[str, list[Option]] = {title: [] for title in ("Top level", *SECTIONS.values())}
    for option in options:
        head, dot, _ = option.key.partition(".")
        found[SECTIONS[head] if dot else "Top level"].append(option)
    return found


def help_of(option: Option) -> str:
    """Return the help text of an option."""
    return field_docs(option.schema).get(option.key.rpartition(".")[2], "")


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
