"""How one plugin is imported, registered and asked for its parts. `PluginManager` keeps the plugins.

Every error is a `ConfigError` that says what was given, what is wrong with it, and what to do.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from minisgl import hooks
from minisgl.config import ConfigError

HOOKS = tuple(name for name in vars(hooks) if name.startswith("minisgl_"))
BUILT_IN = "minisgl.plugins"
"""The package of the built-in plugins: the part ``group=name`` is registered by the module ``<group>.<name>`` in it."""
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
    """Return an error message, which names the command that installs the package if there is ``plugins/command``."""
    name = f"{BUILT_IN}.command.packages"
    return f"{importlib.import_module(name).missing_package(error) if exists(name) else error}"


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


Registered = tuple[tuple[str, ...], tuple[tuple[str, str, type], ...]]
"""The names of a plugin's hooks, and the parts that it registers: (group, name, dataclass)."""


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

    def add(self, module: ModuleType, label: str) -> Registered:
        """Let the hooks of a plugin be called from now on: its functions, and the methods of its classes."""
        before = self.pluggy.get_plugins()
        parts = [module, *self.objects(module, label)]
        for part in parts:
            self.register(part, label, label if part is module else f"{label}:{type(part).__name__}")
        found = {caller.name for part in parts for caller in self.pluggy.get_hookcallers(part) or ()}
        configs = self.pluggy.subset_hook_caller("minisgl_configs", before)
        return tuple(sorted(found)), self.options(configs(), label) if "minisgl_configs" in found else ()

    def objects(self, module: ModuleType, label: str) -> list[object]:
        """Return an object of each class of a plugin that has hooks as methods."""
        return [cls() for cls in hook_classes(module)]

    def options(self, yielded: Iterable[Any], label: str) -> tuple[tuple[str, str, type], ...]:
        """Return what the `minisgl_configs` hooks of a plugin yielded."""
        return tuple(option for each in yielded for option in each)

    def register(self, part: object, label: str, name: str | None = None) -> None:
        """Let ``part``, which has hooks as functions or methods, be called from now on."""
        self.pluggy.register(part, name=name)

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


def sha256(module: ModuleType) -> str:
    """Return the SHA-256 of a module's file. That of a plugin file is of the file as it was when it was loaded."""
    return module.__dict__.get("__sha256__") or hashlib.sha256(Path(module.__file__ or "").read_bytes()).hexdigest()


def taken(build: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments ``given`` that a method ``build`` takes."""
    return {name: given[name] for name in inspect.signature(build).parameters}
