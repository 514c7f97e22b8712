"""The clean installation of minisgl in which a student's file runs: a copy without everything that solves the lab.

`CleanTree` copies the installed package into a folder, makes it read-only, and puts a Python environment around it that
finds the other packages where they are installed. The copy lacks the modules in `absent`: the lab's reference, other
plugins that solve it, the chapters, the ladder, the site, the skeletons and, for labs that the grader judges in its own
process, the gates with their oracles. It is built once for each lab.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import minisgl
from minisgl.chapters.lab.catalog import Lab, labs

__all__ = ["CleanTree", "absent", "kept"]

_ALWAYS = (
    "minisgl.chapters.ladder", "minisgl.chapters.site", "minisgl.chapters.tutor", "minisgl.chapters.lab.generate",
    "minisgl.chapters.lab.box", "minisgl.chapters.lab.cli", "minisgl.chapters.lab.watch", "minisgl.demo",
    "minisgl.chapters.lab.museum",
)  # fmt: skip
"""Modules that are absent for every lab: they contain or print solutions, or have no use there."""
_JUDGES = ("minisgl.chapters.lab.gates", "minisgl.testing", "minisgl.chapters.lab.grader.cache_histories",
           "minisgl.chapters.lab.grader.simulated_workloads", "minisgl.chapters.lab.grader.observer_runs",
           "minisgl.chapters.lab.grader.draft_texts", "minisgl.chapters.lab.grader.conformance",
           "minisgl.chapters.lab.grader.model_parts", "minisgl.chapters.lab.grader.search")  # fmt: skip
"""Modules with gates and oracles: absent if the grader judges the lab's gates in its own process."""

_LAB = '"""The labs. In a clean installation, this package exports nothing."""\n'


def absent(lab: Lab) -> tuple[str, ...]:
    """Return the modules that the clean installation of a lab lacks."""
    solved = tuple(module for module in lab.forbidden if module not in lab.kept)
    if lab.data:
        return (*solved, *_ALWAYS, *_JUDGES)
    others = tuple(f"minisgl.chapters.lab.gates.{other.lab}" for other in labs() if other.lab != lab.lab)
    return (*solved, *_ALWAYS, *others)


def kept(lab: Lab) -> tuple[str, ...]:
    """Return the modules that a student's file may not import, and that stay because the lab's own gates need them."""
    return tuple(module for module in lab.forbidden if module in lab.kept)


def dependencies() -> list[Path]:
    """Return the folders of installed packages of this Python."""
    found = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [path for path in dict.fromkeys(found) if path.is_dir()]


class CleanTree:
    """The clean installation in the folder ``at``, for one lab. It is built if the folder does not exist.

    ``python`` is its interpreter.
    """

    def __init__(self, lab: Lab, at: Path):
        self.lab, self.at = lab, at
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = at / "lib" / version / "site-packages"
        self.python = at / "bin" / "python"
        if not at.exists():
            self._build()

    def _build(self) -> None:
        self.packages.mkdir(parents=True)
        self.python.parent.mkdir()
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        self.python.symlink_to(base)
        (self.at / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
        (self.packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in dependencies()))
        root = self.packages / "minisgl"
        for name in self._packages():
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.submodule_search_locations is not None, name
            folder = Path(next(iter(spec.submodule_search_locations)))
            self._copy(folder, root / Path(*name.split(".")[1:]), name)
        _replace(root / "chapters" / "lab" / "__init__.py", _LAB)
        _replace(root / "plugin_manager" / "manager.py", self._without_builtins)
        _make_read_only(self.at)

    def _packages(self) -> Iterator[str]:
        """Yield the packages that have a folder of their own: minisgl, and those that are elsewhere in a checkout."""
        yield "minisgl"
        for name in ("minisgl.plugins", "minisgl.conf"):
            found = importlib.util.find_spec(name)
            assert found is not None
            inside = Path(next(iter(found.submodule_search_locations or ()))).is_relative_to(_folder())
            if not inside:
                yield name
        yield "minisgl.chapters"

    def _copy(self, source: Path, target: Path, name: str) -> None:
        """Copy a package's folder, without absent modules, tests and compiled files of absent modules."""
        removed = absent(self.lab)
        for folder, folders, files in os.walk(source):
            here = Path(folder)
            module = ".".join([name, *here.relative_to(source).parts])
            folders[:] = [f for f in folders if f not in ("__pycache__", "tests") and f"{module}.{f}" not in removed]
            if name == "minisgl.chapters" and re.match(r"\d", here.relative_to(source).as_posix()):  # a chapter
                files = [file for file in files if file == f"{self.lab.lab}.toml"]
                folders.clear()
            elif module == "minisgl" and "chapters" in folders:
                folders.remove("chapters")
            for file in files:
                if file.endswith(".py") and f"{module}.{file.removesuffix('.py')}" in removed:
                    continue
                to = target / here.relative_to(source) / file
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(here / file, to)
                if file.endswith(".py"):
                    _copy_compiled(here / file, to)

    def _without_builtins(self, text: str) -> str:
        """Remove the absent plugins from the list of built-in plugins, which would all be imported at start."""
        for module in absent(self.lab):
            if module.startswith("minisgl.plugins."):
                text = re.sub(rf'^    "{re.escape(module)}",\n', "", text, flags=re.MULTILINE)
        return text

    @property
    def expose(self) -> list[str]:
        """The paths that a process in this installation must see."""
        return [str(path) for path in dict.fromkeys([Path(sys.base_prefix), *dependencies(), self.at])]

    @property
    def hide(self) -> list[str]:
        """The paths below `expose` that show another installation of minisgl."""
        return [str(path) for folder in dependencies() for path in sorted(folder.glob("minisgl*")) if path.is_dir()]


def _replace(module: Path, new: str | Callable[[str], str]) -> None:
    """Give a module of the copy another text, and delete its compiled file."""
    module.write_text(new if isinstance(new, str) else new(module.read_text("utf-8")), "utf-8")
    Path(importlib.util.cache_from_source(str(module))).unlink(missing_ok=True)


def _folder() -> Path:
    return Path(minisgl.__file__ or "").resolve().parent


def _copy_compiled(source: Path, target: Path) -> None:
    """Copy a module's compiled file, so that the installation, which can't be written, need not compile it again."""
    compiled = Path(importlib.util.cache_from_source(str(source)))
    if compiled.is_file():
        to = Path(importlib.util.cache_from_source(str(target)))
        to.parent.mkdir(exist_ok=True)
        shutil.copy2(compiled, to)


def _make_read_only(at: Path) -> None:
    for folder, _, files in os.walk(at):
        for file in files:
            path = Path(folder, file)
            if not path.is_symlink():
                path.chmod(0o444)
        Path(folder).chmod(0o555)


def make_writable(at: Path) -> None:
    """Make the folders below ``at`` writable for their owner again, so that they can be deleted."""
    for folder, _, _ in os.walk(at):
        Path(folder).chmod(stat.S_IRWXU)


def text_of(modules: Sequence[str]) -> dict[str, str]:
    """Return the source of modules, by name. Used to compare a submission with the shipped plugin."""
    found = {}
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = Path(spec.origin).read_text("utf-8")
    return found
