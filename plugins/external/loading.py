"""Finds and imports plugins that are not built in: the Python files and modules of ``plugins=``, and installed ones.

Every error is a `ConfigError` that says what was given, what is wrong with it, and what to do.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

from minisgl.config import ConfigError
from minisgl.plugin_manager.discovery import Plugin, missing_package, near
from minisgl.plugin_manager.failures import named
from minisgl.plugins.external.failures import ends_silently, mark


def load(word: str | EntryPoint, loaded: Sequence[Plugin]) -> tuple[ModuleType, str]:
    """Import the plugin that ``plugins=word`` names, or an installed one, unless it is one of ``loaded``.

    Return it, and "file", "module" or "entry point". Raise `ConfigError`.
    """
    if isinstance(word, EntryPoint):
        origin = f"{word.name} (installed by {word.dist.name if word.dist else 'an unknown package'})"
        return import_module(word.module, origin), "entry point"
    if not word or not isinstance(word, str):
        raise ConfigError(f"plugins={word!r}: write the path of a Python file, or the name of a module.")
    if word.endswith(".py") or os.sep in word or Path(word).is_file():
        path = find_file(word)
        known = next((plugin.module for plugin in loaded if plugin.path == path), None)
        return known or import_file(path, word), "file"
    return import_module(word, f"plugins={word}"), "module"


def find_file(word: str) -> Path:
    """Return the absolute path of the file that ``plugins=word`` names. Raise `ConfigError` if it is not a file."""
    path = Path(word).expanduser()
    if path.is_dir():
        files = ", ".join(sorted(p.name for p in path.glob("*.py"))[:5])
        raise ConfigError(f"plugins={word} is a folder. Name a file in it{files and ': ' + files}.")
    if not path.is_file():
        beside = path.parent if path.parent.is_dir() else Path()
        guess = near(path.name, [p.name for p in beside.glob("*.py")])
        raise ConfigError(f"plugins={word}: there is no such file (looked in {beside.resolve()}){guess}")
    return path.resolve()


def import_file(path: Path, word: str) -> ModuleType:
    """Import a file as a module. ``word`` is the file as the user wrote it, for errors. Raise `ConfigError`.

    The module's name depends only on the file's path, so the plugin's classes have the same names in every process.
    """
    stem = re.sub(r"\W", "_", path.stem)
    name = f"minisgl_plugin_{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins={word} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__sha256__"] = hashlib.sha256(path.read_bytes()).hexdigest()
    mark(module, str(path))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception) or ends_silently(error):
            raise ConfigError(f"plugins={word}: {_import_failure(error, path)}") from error
        raise
    return module


def import_module(name: str, label: str) -> ModuleType:
    """Import the module ``name``. ``label`` says in an error where the name was given. Raise `ConfigError`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{label}: there is no module {name!r}. Give the path of a Python file (my_plugin.py), or the name of "
                "an installed module."
            ) from error
        raise ConfigError(f"{label}: {missing_package(error)}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and not ends_silently(error):
            raise
        spec = importlib.util.find_spec(name)
        raise ConfigError(f"{label}: {_import_failure(error, Path((spec and spec.origin) or name))}") from error


def _import_failure(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not Python: {error.msg}: {(error.text or '').strip()}"
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = frame.tb_lineno
        frame = frame.tb_next
    what = missing_package(error) if isinstance(error, ImportError) else named(error)
    return f"importing it failed at line {line}: {what}"
