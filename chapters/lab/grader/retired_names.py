"""Names that an older minisgl had: which of them a lab file uses, and which names replaced them.

Reads the tables of `old_names.py`. A lab file is checked twice. `upgrade_note` reads the source of a
file whose header names an older version, before the gates run. `renamed_in` reads an exception, whatever the header
says.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from minisgl.chapters.lab.catalog import Lab
from minisgl.chapters.lab.grader.old_names import (
    RENAMED_ATTRIBUTES,
    RENAMED_IMPORTS,
    RENAMED_METRICS,
    RENAMED_SINCE,
    UPGRADE_PAGE,
)
from minisgl.chapters.lab.skeletons import started_with

__all__ = ["renamed_in", "upgrade_note"]

CLASSES = {
    "scheduler": ("Waiting", "Running"),
    "cache": ("PrefixCache",),
    "attention": ("AttnBatch", "AttnNeeds", "GraphKey"),
    "graph": ("GraphRunner", "GraphKey", "EngineSpec"),
    "observer": ("Req", "Step", "Admission", "EngineSpec"),
}
"""Hook of a lab → the classes whose attributes its students read or implement. Without an entry: every class."""
IMPLEMENTED = ("PrefixCache", "GraphRunner")
"""The classes that a student's own class implements: their old names also count as ``self.name`` and ``def name``."""


def upgrade_note(lab: Lab, path: Path) -> list[str]:
    """Return the lines to print before the gates of a file that was started with a version before the renaming.

    The lines list the old names that the file still uses, with their line numbers and new names. Return no lines for a
    file that was started with this version, for a file without a header, and for a folder.
    """
    if not path.is_file():
        return []
    text = path.read_text("utf-8", errors="replace")
    version = started_with(text)
    if version is None or _numbers(version) >= _numbers(RENAMED_SINCE):
        return []
    head = f"{path.name} was started with minisgl {version}. minisgl {RENAMED_SINCE} renamed some names"
    found = list(_old_names(lab, text))
    if not found:
        return [f"{head}; none of them was found in this file. {UPGRADE_PAGE} lists all renamed names."]
    lines: dict[str, list[int]] = {}
    for number, change in found:
        lines.setdefault(change, []).append(number)
    listed = [
        f"  line{'s' * (len(set(at)) > 1)} {', '.join(map(str, sorted(set(at))))}: {change}"
        for change, at in sorted(lines.items(), key=lambda item: item[1][0])
    ]
    return [f"{head} that this file uses:", *listed, f"{UPGRADE_PAGE} lists all renamed names."]


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and the chain of its causes, each once: a chain may be a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def renamed_in(error: BaseException | None, path: Path) -> str:
    """Return a sentence that names the new name if ``error`` comes from an old one, otherwise an empty string.

    An AttributeError and an ImportError name what is missing. The missing name is the old one where the student's code
    reads an attribute or imports a name; it is the new one where the engine reads an attribute of the student's object.
    ``path`` is the student's file: only objects of its classes count for the second case.
    """
    for each in causes_of(error):
        change = ""
        if isinstance(each, AttributeError) and each.name:
            change = _attribute(each.obj, each.name, path)
        elif isinstance(each, ImportError):
            missing = re.search(r"cannot import name '(\w+)' from '([\w.]+)'", str(each))
            new = RENAMED_IMPORTS.get(missing[2], {}).get(missing[1]) if missing else None
            change = f"`{missing[1]}` of {missing[2]} to `{new}`" if missing and new else ""
        if change:
            return f"minisgl {RENAMED_SINCE} renamed {change}. Rename it in your file; {UPGRADE_PAGE} lists all names."
    return ""


def _attribute(owner: object, name: str, path: Path) -> str:
    """Say which attribute of ``owner`` was renamed, given the missing ``name``; empty if the tables lack the name."""
    new = RENAMED_IMPORTS.get(getattr(owner, "__name__", ""), {}).get(name)
    if new:
        return f"`{name}` of {getattr(owner, '__name__', '')} to `{new}`"
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__:
        new = RENAMED_ATTRIBUTES.get(base.__name__, {}).get(name)
        if new:
            return f"`{name}` of {base.__name__} to `{new}`"
    if getattr(sys.modules.get(kind.__module__), "__file__", None) == str(path):
        for base_name in IMPLEMENTED:
            for old, new in RENAMED_ATTRIBUTES[base_name].items():
                with contextlib.suppress(Exception):  # a property of the student's may raise
                    if new == name and hasattr(owner, old):
                        return f"`{old}` of {base_name}, which your class {kind.__name__} implements, to `{new}`"
    return ""


def _old_names(lab: Lab, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, change in words) for each old name in the source, for the classes of the lab's hook.

    A name that a class of the file defines itself, such as an option of its config class, is not reported.
    """
    classes = CLASSES.get(lab.hook or "", tuple(RENAMED_ATTRIBUTES) if lab.hook is None else ())
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the gate `loads` reports it
        return
    own = set(_own_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                new = RENAMED_IMPORTS.get(node.module, {}).get(alias.name)
                if new:
                    yield node.lineno, f"{alias.name} of {node.module} is now {new}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for old, new in RENAMED_METRICS.items():
                if old in node.value:
                    yield node.lineno, f"the metric {old} is now {new}"
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", "")
        if not isinstance(node, ast.Attribute | ast.FunctionDef):
            continue
        for base in classes:
            new = RENAMED_ATTRIBUTES[base].get(name)
            if new and (name not in own or base in IMPLEMENTED):
                yield node.lineno, f".{name} of {base} is now .{new}"


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the classes of a file define: methods, fields, and attributes assigned to ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
