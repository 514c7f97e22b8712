"""The reference pages of the docs, written from the sources: `python -m minisgl.options.reference docs/reference`.

`options.md` comes from the dataclasses and `hooks.md` from `minisgl/hooks.py`; a test says so when they are stale.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl import hooks
from minisgl.config import GROUPS
from minisgl.options.describe import PRESETS, Option, core_options, default_choice, doc_of, options_of, presets
from minisgl.plugin_manager.discovery import HOOKS
from minisgl.plugin_manager.manager import PluginManager


def pages() -> dict[str, str]:
    """File name → content, for the built-in plugins."""
    return {"options.md": options_page(PluginManager.load(light=True)), "hooks.md": hooks_page()}


def options_page(manager: PluginManager) -> str:
    """Every option, as ``--help`` prints them."""
    lines = [
        "# Options",
        "",
        "Every word on the command line is `option=value`. `python -m minisgl --help` prints what this page says; both",
        "are read off the dataclasses that hold the options. To write the page anew: `make reference`.",
        "",
    ]
    core = core_options()
    for title, chosen in (
        ("Top level", [o for o in core if not o.key.startswith("server.")]),
        ("Server", [o for o in core if o.key.startswith("server.")]),
    ):
        lines += [f"## {title}", "", *_table(chosen), ""]
    for group in GROUPS:
        lines += [f"## `{group}`", "", f"Default: `{group}={default_choice(group)}`.", ""]
        for name, schema in sorted(manager.configs[group].items()):
            lines += [f"### `{group}={name}`", "", code(doc_of(schema)), ""]
            own = options_of(schema, f"{group}.")
            lines += [*_table(own), ""] if own else []
    for kind in PRESETS:
        lines += [f"## `{kind}`", "", "Several options at once; your own words override them.", ""]
        lines += ["| word | what it is |", "| --- | --- |"]
        lines += [f"| `{kind}={name}` | {code(text)} |" for name, text in presets(kind).items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table(options: list[Option]) -> list[str]:
    rows = ["| option | type | default | |", "| --- | --- | --- | --- |"]
    for o in options:
        cells = (f"`{o.key}`", f"`{o.type_name}`", f"`{o.default_text}`", code(o.help))
        rows.append("| " + " | ".join(c.replace(" | ", " \\| ") for c in cells) + " |")
    return rows


def code(text: str) -> str:
    return text.replace("``", "`")


def hooks_page() -> str:
    """Every hook with its arguments and the docstring that says when it is called."""
    lines = [
        "# Hooks",
        "",
        *(code(" ".join(part.split())) + "\n" for part in inspect.cleandoc(hooks.__doc__ or "").split("\n\n")[1:]),
        "A hook may leave out arguments that it does not use. To write this page anew: `make reference`.",
        "",
    ]
    for name in HOOKS:
        spec = getattr(hooks, name)
        signature = inspect.signature(spec)
        arguments = ", ".join(f"{p.name}: {p.annotation}" for p in signature.parameters.values())
        first = getattr(spec, f"{hooks.PROJECT}_spec")["firstresult"]
        doc = " ".join(inspect.cleandoc(spec.__doc__ or "").split())
        kind = " The first result that is not None wins." if first else ""
        lines += [f"## `{name}`", "", "```python", f"{name}({arguments}) -> {signature.return_annotation}", "```", ""]
        lines += [code(doc) + kind, ""]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str]) -> None:
    """Write the pages into the folder that the one argument names."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        raise SystemExit("usage: python -m minisgl.options.reference docs/reference")
    for name, text in pages().items():
        (Path(argv[0]) / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
