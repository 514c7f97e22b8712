"""Generator of the docs' reference pages: `python -m minisgl.chapters.site.reference docs/reference`.

`compatibility.md` is made by `minisgl.chapters.site.compatibility`.
`options.md` is generated from the dataclasses of the options, and `hooks.md` from `minisgl/hooks.py` and the example
plugins in `docs/examples/hooks/` and `docs/examples/parts/`. A test fails if a page in the docs differs from the
generated page.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl import hooks
from minisgl.chapters.site import compatibility
from minisgl.config import GROUPS
from minisgl.plugin_manager.discovery import HOOKS
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import PRESETS, Option, core_options, options_of
from minisgl.plugins.command.help import doc_of, help_of, sections
from minisgl.plugins.command.listing import default_choice, default_text, presets, type_name
from minisgl.plugins.external.parts import PARTS, PartSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "hooks"
"""The folder of a source checkout with one example plugin per hook, ``<hook>.py``."""


def pages() -> dict[str, str]:
    """Return the reference pages of the built-in plugins: file name → content."""
    options = options_page(PluginManager.load(light=True))
    return {"options.md": options, "hooks.md": hooks_page(), "compatibility.md": compatibility.page()}


def options_page(manager: PluginManager) -> str:
    """Return the page of all options: key, type, default and help text."""
    manager.load_all()
    lines = [
        "# Options",
        "",
        "An option is set on the command line as `option=value`. `python -m minisgl --help` prints the same",
        "descriptions.",
        "This page is generated from the dataclasses that define the options: `make reference`.",
        "",
    ]
    for title, chosen in sections(core_options()).items():
        lines += [f"## {title}", "", *_table(chosen), ""]
    for group in GROUPS:
        lines += [f"## `{group}`", "", f"Default: `{group}={default_choice(group)}`.", ""]
        for name, schema in sorted(manager.configs[group].items()):
            lines += [f"### `{group}={name}`", "", code(doc_of(schema)), ""]
            own = options_of(schema, f"{group}.")
            lines += [*_table(own), ""] if own else []
    for kind in PRESETS:
        lines += [f"## `{kind}`", "", "A preset sets several options. Other arguments override it.", ""]
        lines += ["| argument | description |", "| --- | --- |"]
        lines += [f"| `{kind}={name}` | {code(text)} |" for name, text in presets(kind).items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table(options: list[Option]) -> list[str]:
    rows = ["| option | type | default | |", "| --- | --- | --- | --- |"]
    for o in options:
        cells = (f"`{o.key}`", f"`{type_name(o)}`", f"`{default_text(o)}`", code(help_of(o)))
        rows.append("| " + " | ".join(c.replace(" | ", " \\| ") for c in cells) + " |")
    return rows


def code(text: str) -> str:
    """Return a docstring's text with Markdown's code marks (`) in place of reStructuredText's (``)."""
    return text.replace("``", "`")


def hooks_page() -> str:
    """Return the page of all hooks: when each is called, its parameters, its result, and an example plugin."""
    lines = [
        "# Hooks",
        "",
        *(code(" ".join(part.split())) + "\n" for part in inspect.cleandoc(hooks.__doc__ or "").split("\n\n")[1:]),
        "`I32` in a signature is a numpy array of int32.\n",
        "Every example is a complete plugin. Save it as a file and load the file with `plugins=FILE.py`. This page",
        "is generated from `minisgl/hooks.py`, `plugins/external/parts.py`, `docs/examples/hooks/` and",
        "`docs/examples/parts/`: `make reference`.",
        "",
    ]
    for name in HOOKS:
        lines += _hook(name)
        if name == "minisgl_configs":
            for group, part in PARTS.items():
                lines += _part(group, part)
    return "\n".join(lines).rstrip() + "\n"


def _hook(name: str) -> list[str]:
    """Return the section of one hook. Raise ValueError if its docstring does not describe all parameters in order."""
    spec = getattr(hooks, name)
    signature = inspect.signature(spec)
    arguments = ", ".join(f"{p.name}: {p.annotation}" for p in signature.parameters.values())
    summary, *parts = (part for part in inspect.cleandoc(spec.__doc__ or "").split("\n\n") if part)
    lines = [f"## `{name}`", "", code(" ".join(summary.split())), ""]
    lines += ["```python", f"{name}({arguments}) -> {signature.return_annotation}", "```", ""]
    described: list[str] = []
    for part in parts:
        if part.startswith("- "):
            items = [" ".join(item.split()).partition(": ") for item in part.removeprefix("- ").split("\n- ")]
            described = [parameter.strip("`") for parameter, _, _ in items]
            lines += ["| parameter | type | meaning |", "| --- | --- | --- |"]
            for parameter, (_, _, meaning) in zip(described, items, strict=True):
                kind = str(signature.parameters[parameter].annotation).replace("|", "\\|")
                lines.append(f"| `{parameter}` | `{kind}` | {code(meaning)[0].upper() + code(meaning)[1:]} |")
            lines.append("")
        else:
            title, _, text = " ".join(part.split()).partition(": ")
            lines += [f"**{title}:** {code(text)}", ""]
    if described != list(signature.parameters):
        raise ValueError(f"{name} has the parameters {list(signature.parameters)}, its docstring describes {described}")
    if getattr(spec, f"{hooks.PROJECT}_spec")["firstresult"]:
        lines += ["The first result that is not None is used.", ""]
    example = (EXAMPLES / f"{name}.py").read_text("utf-8")
    return [*lines, f'```python title="{name}.py"', *example.rstrip().splitlines(), "```", ""]


def _part(group: str, part: PartSpec) -> list[str]:
    """Return the section of a group of parts, below the hook that registers them."""
    other = {"build_other": "``build_other(name)`` builds another part of the group by name, with default options"}
    lines = [f"### The group `{group}`", "", f"**`build` returns:** {code(part.builds)}.", ""]
    lines += [f"**When:** {code(part.when)}.", "", "| argument of `build` | meaning |", "| --- | --- |"]
    for argument, meaning in {**part.arguments, **other}.items():
        lines.append(f"| `{argument}` | {code(meaning)} |")
    example = (EXAMPLES.parent / "parts" / f"{group}.py").read_text("utf-8")
    return [*lines, "", f'```python title="{group}.py"', *example.rstrip().splitlines(), "```", ""]


def main(argv: Sequence[str]) -> None:
    """Write the pages into the folder ``argv[0]``."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        raise SystemExit("usage: python -m minisgl.chapters.site.reference docs/reference")
    for name, text in pages().items():
        (Path(argv[0]) / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
