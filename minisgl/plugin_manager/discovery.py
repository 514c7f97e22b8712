"""Functions that find, import and check a plugin. The checks find mistakes that pluggy would silently ignore.

Every error is a `ConfigError` that says what was given, what is wrong with it, and what to do. This module has no
state: `PluginManager` keeps the plugins.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minisgl import hooks
from minisgl.config import GROUPS, ConfigError
from minisgl.plugin_manager.failures import ends_silently, mark, named
from minisgl.plugin_manager.renamed import FACTORY_HOOKS, RENAMED_HOOK_ARGUMENTS, RENAMED_SINCE, UPGRADE_PAGE

log = logging.getLogger(__name__)

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


# ---- checks ------------------------------------------------------------------------------------------


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


def instantiate(cls: type, label: str) -> object:
    """Return an object of a class with hooks. Raise `ConfigError` if its constructor needs arguments, or fails."""
    try:
        return cls()
    except BaseException as error:
        if not isinstance(error, Exception) and not ends_silently(error):
            raise
        raise ConfigError(
            f"{label}: {cls.__name__} has hooks as methods, so the plugin manager calls {cls.__name__}() without "
            f"arguments, which failed: {named(error)}. To make an object that needs arguments, return it from the hook "
            "minisgl_observer."
        ) from error


def check_hooks(part: object, label: str) -> list[str]:
    """Return the names of the hooks that a module or an object implements.

    Raise `ConfigError` for a hook that pluggy would never call, or would call with an argument that does not exist.
    """
    module = part.__name__ if isinstance(part, ModuleType) else type(part).__module__
    found = []
    for name in dir(part):
        function = inspect.getattr_static(part, name)
        if not inspect.isfunction(function) or (
            function.__module__ != module and not hasattr(function, HOOKIMPL_ATTRIBUTE)
        ):
            continue
        if not hasattr(function, HOOKIMPL_ATTRIBUTE):
            if name.startswith("minisgl_") and isinstance(part, ModuleType):
                unknown = "" if name in HOOKS else f" There is no hook of that name either{near(name, HOOKS)}"
                raise ConfigError(
                    f"{label}: {name} has no @hookimpl above it, so it would never be called. Add "
                    f"`from minisgl import hookimpl` and the line @hookimpl.{unknown}"
                )
            continue
        hook = getattr(function, HOOKIMPL_ATTRIBUTE).get("specname") or name
        if hook in FACTORY_HOOKS:
            log.warning(
                "%s: the hook %s is deprecated and will be removed: write its body as the method `build` of the options"
                " dataclass, which takes %s by name (docs/upgrade-0.3.md)",
                label,
                hook,
                ", ".join([*hooks.PARTS[FACTORY_HOOKS[hook]].arguments, "build_other"]),
            )
            found.append(hook)
            continue
        if hook not in HOOKS:
            raise ConfigError(f"{label}: there is no hook {hook}{near(hook, HOOKS)} All of them: {', '.join(HOOKS)}.")
        allowed = list(inspect.signature(getattr(hooks, hook)).parameters)
        renamed: Mapping[str, str] = RENAMED_HOOK_ARGUMENTS.get(hook, {})
        for argument in inspect.signature(getattr(part, name)).parameters:
            if argument in renamed:
                raise ConfigError(
                    f"{label}: the argument {argument!r} of {name} was renamed to {renamed[argument]!r} in minisgl "
                    f"{RENAMED_SINCE}. Rename it in the plugin; {UPGRADE_PAGE} lists all renamed names."
                )
            if argument not in allowed:
                raise ConfigError(
                    f"{label}: {name} takes {argument!r}, which this hook does not offer{near(argument, allowed)} "
                    f"It may take any of: {', '.join(allowed) or 'nothing'}."
                )
        found.append(hook)
    return found


def check_options(yielded: Any, label: str) -> list[tuple[str, str, type]]:
    """Return the items that a ``minisgl_configs`` hook yielded, as a list of (group, name, dataclass).

    Raise `ConfigError` for an item of another form, an unknown group or a frozen dataclass.
    """
    if not isinstance(yielded, Iterable):
        raise ConfigError(f"{label}: minisgl_configs must yield (group, name, dataclass); it has no `yield`.")
    options = []
    try:
        items = list(yielded)
    except BaseException as error:
        if not isinstance(error, Exception) and not ends_silently(error):
            raise
        raise ConfigError(f"{label}: minisgl_configs failed: {named(error)}") from error
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 3 and isinstance(item[2], type) and is_dataclass(item[2])):
            raise ConfigError(f'{label}: minisgl_configs must yield (group, name, dataclass), as in `yield "cache", '
                              f'"mine", Mine`; it yielded {item!r}.')  # fmt: skip
        group, name, schema = item
        if group not in GROUPS:
            raise ConfigError(f"{label}: there is no group {group!r}{near(group, GROUPS)} Groups: {', '.join(GROUPS)}.")
        if schema.__dataclass_params__.frozen:
            raise ConfigError(f"{label}: {schema.__name__} is a frozen dataclass, which options can't be: drop frozen.")
        _check_build(group, schema, label)
        options.append((group, name, schema))
    return options


METHODS = {
    "attention": "forward",
    "cache": "match",
    "scheduler": "plan",
    "moe": "forward",
    "graph": "wrap",
    "communicator": "all_reduce",
    "speculation": "propose",
    "kernels": "convert_sampler",
    "quantization": "open",
    "fp8_gemm": "forward",
    "routing": "choose",
    "router": "start",
    "tokenizer": "encode",
}
"""Group → a method that every object of the group has."""


MAY_BE_NONE = frozenset({"tokenizer"})
"""The groups whose ``build`` may return None."""


def check_made(group: str, made: object, label: str) -> None:
    """Raise `ConfigError` if what ``build`` returned is a class, or is clearly no part of its group."""
    method = METHODS[group]
    if made is None and group in MAY_BE_NONE:
        return
    if isinstance(made, type):
        raise ConfigError(f"{label}: build returned the class {made.__name__}. Return an object of it.")
    if not callable(getattr(made, method, None)):
        raise ConfigError(
            f"{label}: build returned an object of the type {type(made).__name__}, which has no method {method!r}. "
            "minisgl/hooks.py says what it must return."
        )


def _check_build(group: str, schema: type, label: str) -> None:
    """Raise `ConfigError` if the method ``build`` of an options dataclass takes an argument that its group lacks."""
    build = getattr(schema, "build", None)
    if build is None:  # a plugin for minisgl 0.2, which builds the part with a hook: see `FACTORY_HOOKS`
        return
    offered = [*hooks.PARTS[group].arguments, "build_other"]
    for argument in list(inspect.signature(build).parameters)[1:]:
        if argument not in offered:
            raise ConfigError(
                f"{label}: {schema.__name__}.build takes {argument!r}, which the group {group} does not offer"
                f"{near(argument, offered)} It may take any of: {', '.join(offered)}."
            )
