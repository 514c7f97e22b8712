"""How one plugin is imported, registered and asked for its parts. `PluginManager` keeps the plugins.

Every error is a `ConfigError` that says what was given, what is wrong with it, and what to do.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from minisgl import hooks
from minisgl.config import ConfigError

HOOKS = tuple(name for name in vars(hooks) if name.startswith("minisgl_"))
HOOKIMPL_ATTRIBUTE = f"{hooks.PROJECT}_impl"
"""The attribute that ``@hookimpl`` sets on a function."""


# ---- finding and importing ---------------------------------------------------------------------------


def exists(name: str) -> bool:
    """Return whether there is a module of this name. The packages that contain it are imported, the module is not."""
    try:
        return all(part.isidentifier() for part in name.split(".")) and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def submodules(package: str) -> list[str]:
    """Return the names of the modules and packages in a package; none if there is no such package."""
    spec = importlib.util.find_spec(package) if exists(package) else None
    return sorted(found.name for found in pkgutil.iter_modules((spec and spec.submodule_search_locations) or []))


def import_module(name: str, label: str) -> ModuleType:
    """Import the module ``name``. ``label`` says in an error where the name was given. Raise `ConfigError`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{label}: {missing_package(error)}") from error


def missing_package(error: ImportError) -> str:
    """Return an error message that names the missing package and the command that installs it.

    The command installs one of minisgl's extras if that extra includes the package.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"{error}. Check the spelling, and that the package's version has it."
    package = error.name.partition(".")[0]
    if "relative import" in str(error) or not package:
        return f"{error}. A plugin file is not part of a package: use absolute imports."
    command = f"pip install {package.replace('_', '-')}"
    wanted = re.sub(r"[-_.]+", "-", package).lower()
    try:
        requirements = importlib.metadata.requires("minisgl") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        brought = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
        if extra and (brought == wanted or brought.startswith(wanted + "-")):
            command = f"pip install 'minisgl[{extra[1]}]'"
            break
    return f"it needs the package {package!r}, which is not installed. Try: {command}"


# ---- names and hooks ---------------------------------------------------------------------------------


def printed() -> bool:
    """Return whether to print every hook call: the environment variable ``MINISGL_TRACE_HOOKS`` is set and not 0."""
    return os.environ.get("MINISGL_TRACE_HOOKS", "0") not in ("", "0")


def near(word: str, words: Iterable[str]) -> str:
    """Return ``. Did you mean x?`` for the name in ``words`` that is most similar to ``word``, or ``.`` if none is."""
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.6)
    return f". Did you mean {close[0]}?" if close else "."


def hook_classes(module: ModuleType) -> list[type]:
    """Return the classes of a module that have hooks as methods.

    Each plugin manager makes one object of each of these classes, so that the object's state belongs to one engine. The
    result is empty if the module has the hook `minisgl_observer`, which makes the objects itself.
    """
    if hasattr(getattr(module, "minisgl_observer", None), HOOKIMPL_ATTRIBUTE):
        return []
    own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    return [c for c in own if any(hasattr(getattr(c, n, None), HOOKIMPL_ATTRIBUTE) for n in dir(c))]


def has_hooks(module: ModuleType) -> bool:
    """Return whether a module has a hook, as a function or as a method of a class."""
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    return any(hasattr(each, HOOKIMPL_ATTRIBUTE) for each in functions) or bool(hook_classes(module))


# ---- registering -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plugin:
    """One loaded plugin, as `python -m minisgl.plugins` prints it."""

    name: str
    source: str  # "built-in", "entry point", "file" or "module"
    path: Path
    module: ModuleType
    hooks: tuple[str, ...]
    options: tuple[tuple[str, str, type], ...]  # (group, name, dataclass)
    sha256: str  # of the file as it was when it was loaded


class Registrar:
    """Registers plugins and builds their parts, as they are.

    For plugins that are not built in, ``plugins/external`` has a registrar that loads them, checks them, with advice on
    each mistake, counts their calls, and accepts plugins for minisgl 0.2. ``label`` names the plugin or the part in
    errors.
    """

    def __init__(self, manager: pluggy.PluginManager):
        self.pluggy = manager

    def load(self, word: str | importlib.metadata.EntryPoint, loaded: Sequence[Plugin]) -> tuple[ModuleType, str]:
        """Import a plugin that is not built in. Return its module, and its source. Raise `ConfigError`."""
        raise ConfigError(f"plugins={word}: there is no folder plugins/external, so only built-in plugins can be used.")

    def objects(self, module: ModuleType, label: str) -> list[object]:
        """Return an object of each class of a plugin that has hooks as methods."""
        return [cls() for cls in hook_classes(module)]

    def register(self, part: object, label: str, name: str | None = None) -> None:
        """Let ``part``, which has hooks as functions or methods, be called from now on."""
        try:
            self.pluggy.register(part, name=name)
        except pluggy.PluginValidationError as error:
            raise ConfigError(f"{label}: {error}") from error

    def options(self, yielded: Iterable[Any], label: str) -> list[tuple[str, str, type]]:
        """Return what a `minisgl_configs` hook yielded."""
        return list(yielded)

    def loaded(self, plugin: Plugin, parts: Iterable[object]) -> None:
        """Take note of a plugin whose ``parts``, the module and its objects, have been registered."""

    def build(self, group: str, config: Any, given: Mapping[str, Any], label: str) -> Any:
        """Return the part that ``config`` builds with those of the arguments ``given`` that it takes."""
        return config.build(**taken(config.build, given))

    def models(self, found: Any, label: str) -> Mapping[str, type]:
        """Return the model classes that a `minisgl_models` hook returned."""
        classes: Mapping[str, type] = found
        return classes

    def call_counts(self) -> list[tuple[str, str, str, str, int]]:
        """Return (plugin name, path, SHA-256, hook or method, number of calls), where calls are counted."""
        return []


def taken(build: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments ``given`` that a method ``build`` takes."""
    return {name: given[name] for name in inspect.signature(build).parameters}


MOVED = {
    "Constraint": "minisgl.plugins.constraint.base",
    "DraftProposer": "minisgl.plugins.speculation",
    "MoELayer": "minisgl.plugins.models.experts",
    "MoeBackend": "minisgl.plugins.moe",
    "mask_of": "minisgl.plugins.constraint.base",
    "pack_mask": "minisgl.plugins.constraint.base",
}
"""Public names that moved in 0.3 → the module that has them now. They still work at their old place, with a warning."""


def moved(module: str, name: str) -> Any:
    """Return what ``name``, which ``module`` does not have any more, is now. Log a warning that says where it is.

    Raise AttributeError if ``name`` has not moved. A module calls this function in its ``__getattr__``.
    """
    if name not in MOVED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    logging.getLogger(__name__).warning(
        "%s.%s has moved: write `from %s import %s` (docs/upgrade-0.3.md)", module, name, MOVED[name], name
    )
    return getattr(importlib.import_module(MOVED[name]), name)
