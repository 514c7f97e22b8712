"""Finding a plugin's file or module, importing it, and the checks of what pluggy would let pass in silence.

Every error here is a `ConfigError` that says what was given, what is wrong with it, and what to do. The host keeps
what is found; nothing is kept here.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minisgl import hooks
from minisgl.config import GROUPS, ConfigError

HOOKS = tuple(name for name in vars(hooks) if name.startswith("minisgl_"))
MARK = f"{hooks.PROJECT}_impl"
"""The attribute that ``@hookimpl`` leaves on a function."""


# ---- finding and importing ---------------------------------------------------------------------------


def find_file(word: str) -> Path:
    """The absolute path that ``plugins=word`` names. Raises `ConfigError` where there is no such file."""
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
    """The file as a module whose name depends on its path alone, so that every process gives its classes one name."""
    stem = re.sub(r"\W", "_", path.stem)
    name = f"minisgl_plugin_{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins={word} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__sha256__"] = hashlib.sha256(path.read_bytes()).hexdigest()
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise ConfigError(f"plugins={word}: {_import_failure(error, path)}") from error
        raise
    return module


def import_module(name: str, label: str) -> ModuleType:
    """The module of that name; ``label`` says in an error what asked for it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{label}: there is no module {name!r}. Give the path of a Python file (my_plugin.py), or the name of "
                "an installed module."
            ) from error
        raise ConfigError(f"{label}: {missing_package(error)}") from error
    except Exception as error:
        spec = importlib.util.find_spec(name)
        raise ConfigError(f"{label}: {_import_failure(error, Path((spec and spec.origin) or name))}") from error


def _import_failure(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not Python: {error.msg}: {(error.text or '').strip()}"
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = frame.tb_lineno
        frame = frame.tb_next
    what = missing_package(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    return f"importing it failed at line {line}: {what}"


def missing_package(error: ImportError) -> str:
    """Which package is missing, and the command that installs it: one of minisgl's extras where that brings it."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"{error}. Check the spelling, and that the package's version has it."
    package = error.name.partition(".")[0]
    if "relative import" in str(error) or not package:
        return f"{error}. A plugin file stands alone: use absolute imports."
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


# ---- what pluggy lets pass ---------------------------------------------------------------------------


def near(word: str, words: Iterable[str]) -> str:
    """``. Did you mean x?``, or ``.`` where nothing is near."""
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.6)
    return f". Did you mean {close[0]}?" if close else "."


def hook_classes(module: ModuleType) -> list[type]:
    """Classes of the module that have hooks as methods: each host makes its own object of them, to keep state in. None
    where the module makes them itself, in `minisgl_observer`."""
    if hasattr(getattr(module, "minisgl_observer", None), MARK):
        return []
    own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    return [c for c in own if any(hasattr(getattr(c, n, None), MARK) for n in dir(c))]


def instance(cls: type, label: str) -> object:
    """One object of a class with hooks."""
    try:
        return cls()
    except TypeError as error:
        raise ConfigError(
            f"{label}: {cls.__name__} has hooks as methods, so each host makes one {cls.__name__}() without arguments, "
            f"and that failed: {error}. One that needs arguments is returned by the hook minisgl_observer."
        ) from error


def check_hooks(part: object, label: str) -> list[str]:
    """The names of a module's or an object's hooks. Raises `ConfigError` for one that would never be called."""
    module = part.__name__ if isinstance(part, ModuleType) else type(part).__module__
    found = []
    for name in dir(part):
        function = inspect.getattr_static(part, name)
        if not inspect.isfunction(function) or (function.__module__ != module and not hasattr(function, MARK)):
            continue
        if not hasattr(function, MARK):
            if name.startswith("minisgl_") and isinstance(part, ModuleType):
                unknown = "" if name in HOOKS else f" There is no hook of that name either{near(name, HOOKS)}"
                raise ConfigError(
                    f"{label}: {name} has no @hookimpl above it, so it would never be called. Add "
                    f"`from minisgl import hookimpl` and the line @hookimpl.{unknown}"
                )
            continue
        hook = getattr(function, MARK).get("specname") or name
        if hook not in HOOKS:
            raise ConfigError(f"{label}: there is no hook {hook}{near(hook, HOOKS)} All of them: {', '.join(HOOKS)}.")
        allowed = list(inspect.signature(getattr(hooks, hook)).parameters)
        asked = list(inspect.signature(getattr(part, name)).parameters)
        for argument in asked:
            if argument not in allowed:
                raise ConfigError(
                    f"{label}: {name} takes {argument!r}, which this hook does not offer{near(argument, allowed)} "
                    f"It may take any of: {', '.join(allowed) or 'nothing'}."
                )
        found.append(hook)
    return found


def check_options(yielded: Any, label: str) -> list[tuple[str, str, type]]:
    """What a ``minisgl_configs`` hook yielded, as a list. Raises `ConfigError` where it can't be options."""
    if not isinstance(yielded, Iterable):
        raise ConfigError(f"{label}: minisgl_configs must yield (group, name, dataclass); it yields nothing.")
    options = []
    try:
        items = list(yielded)
    except Exception as error:
        raise ConfigError(f"{label}: minisgl_configs failed: {type(error).__name__}: {error}") from error
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 3 and isinstance(item[2], type) and is_dataclass(item[2])):
            raise ConfigError(f'{label}: minisgl_configs must yield (group, name, dataclass), as in `yield "cache", '
                              f'"mine", Mine`; it yielded {item!r}.')  # fmt: skip
        group, name, schema = item
        if group not in GROUPS:
            raise ConfigError(f"{label}: there is no group {group!r}{near(group, GROUPS)} Groups: {', '.join(GROUPS)}.")
        if schema.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise ConfigError(f"{label}: {schema.__name__} is a frozen dataclass, which options can't be: drop frozen.")
        options.append((group, name, schema))
    return options
