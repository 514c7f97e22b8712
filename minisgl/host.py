"""The plugin host: finds plugins, checks what pluggy would let pass in silence, and asks them to build things.

It knows hooks and files, and no plugin by what it does: the built-in ones are one tuple of module names here. How a
`Config` is made of the options that plugins add is `minisgl.compose`'s business.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from minisgl import hooks
from minisgl.config import GROUPS, Config, ConfigError
from minisgl.utils.lazy import lazy

__all__ = ["BUILTINS", "ConfigError", "Host", "Plugin"]

BUILTINS = (
    "minisgl.plugins.cache.naive",
    "minisgl.plugins.cache.radix",
    "minisgl.plugins.scheduler.static",
    "minisgl.plugins.scheduler.prefill_first",
    "minisgl.plugins.scheduler.decode_first",
    "minisgl.plugins.scheduler.mixed",
)
MODELS = "minisgl.plugins.models."
HOOKS = tuple(name for name in vars(hooks) if name.startswith("minisgl_"))
MARK = f"{hooks.PROJECT}_impl"
"""The attribute that ``@hookimpl`` leaves on a function."""


@dataclass(frozen=True)
class Plugin:
    """One loaded plugin: what `python -m minisgl.plugins` prints of it."""

    name: str
    source: str  # "built-in", "entry point", "file" or "module"
    path: Path
    module: ModuleType
    hooks: tuple[str, ...]
    options: tuple[tuple[str, str, type], ...]  # (group, name, dataclass)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


class Host:
    """The plugins of one engine. Two hosts in a process share modules, so classes are the same, and nothing else."""

    def __init__(self, *, light: bool = False):
        self.light = light
        self.plugins: list[Plugin] = []
        self.given: list[str] = []
        """What ``plugins=`` named, as a child process must be told it: absolute paths and module names."""
        self.configs: dict[str, dict[str, type]] = {group: {} for group in GROUPS}
        self._owners: dict[tuple[str, str], str] = {}
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        if os.environ.get("MINISGL_TRACE_HOOKS", "0") not in ("", "0"):
            self._manager.add_hookcall_monitoring(_print_call, _print_result)

    @classmethod
    def load(cls, plugins: Sequence[str] = (), *, light: bool = False) -> Host:
        """A host with the built-in plugins, the installed ones (entry points of group ``minisgl``) and ``plugins``:
        Python files or module names. Raises `ConfigError`.

        ``light`` is for processes that compute nothing (the API server, the tokenizers): models are left out, and a
        plugin's ``import torch`` costs nothing until torch is used.
        """
        host = cls(light=light)
        if light:
            lazy("torch")
        for name in BUILTINS:
            if not (light and name.startswith(MODELS)):
                host._add(_import_module(name, name), "built-in")
        for entry in importlib.metadata.entry_points(group=hooks.PROJECT):
            origin = f"{entry.name} (installed by {entry.dist.name if entry.dist else 'an unknown package'})"
            host._add(_import_module(entry.module, origin), "entry point")
        for word in plugins:
            host.add(word)
        return host

    @property
    def hook(self) -> pluggy.HookRelay:
        """pluggy's relay: ``host.hook.minisgl_request_added(req=…, now=…)`` calls every plugin's."""
        return self._manager.hook

    def add(self, word: str) -> Plugin:
        """Load one more plugin: a file's path or a module's name. The same file twice is one plugin."""
        if not word or not isinstance(word, str):
            raise ConfigError(f"plugins={word!r}: write the path of a Python file, or the name of a module.")
        if word.endswith(".py") or os.sep in word or Path(word).is_file():
            path = _find_file(word)
            for plugin in self.plugins:
                if plugin.path == path:
                    self._remember(str(path), plugin)
                    return plugin
            plugin = self._add(_import_file(path, word), "file", word)
            self._remember(str(path), plugin)
        else:
            plugin = self._add(_import_module(word, f"plugins={word}"), "module", word)
            self._remember(word, plugin)
        return plugin

    def _remember(self, word: str, plugin: Plugin) -> None:
        if word not in self.given and plugin.source in ("file", "module"):
            self.given.append(word)

    def _add(self, module: ModuleType, source: str, label: str = "") -> Plugin:
        name = label or module.__name__
        path = Path(module.__file__ or "").resolve()
        for plugin in self.plugins:
            if plugin.module is module or plugin.path == path:
                return plugin
        parts = [module, *(_instance(cls, name) for cls in _hook_classes(module))]
        found = sorted({hook for part in parts for hook in _check_hooks(part, name)})
        if not found:
            raise ConfigError(
                f"{name} has no hook, so it would do nothing. A hook is a function with @hookimpl above it "
                f"(`from minisgl import hookimpl`), named as in minisgl/hooks.py: {', '.join(HOOKS[:8])}, …"
            )
        options: list[tuple[str, str, type]] = []
        for part in parts:
            others = list(self._manager.get_plugins())
            self._manager.register(part, name=f"{name}:{type(part).__name__}" if part is not module else name)
            if hasattr(part, "minisgl_configs"):
                for yielded in self._manager.subset_hook_caller("minisgl_configs", others)():
                    options += _check_options(yielded, name)
        for group, choice, schema in options:
            self._claim((group, choice), name)
            self.configs[group][choice] = schema
        plugin = Plugin(module.__name__, source, path, module, tuple(found), tuple(options))
        self.plugins.append(plugin)
        return plugin

    def _claim(self, what: tuple[str, str], who: str) -> None:
        owner = self._owners.setdefault(what, who)
        if owner != who:
            group, name = what
            named = f"the architecture {name}" if group == "models" else f"{group}={name}"
            raise ConfigError(f"{who} and {owner} both claim {named}. Give one of them another name.")

    # ---- building ------------------------------------------------------------------------------------

    def build(self, group: str, config: Any, **kwargs: Any) -> Any:
        """Ask the plugins to make what ``config`` describes; ``kwargs`` is what the hook ``minisgl_<group>`` takes.

        Raises `ConfigError` where none of them does, or where a package that it needs is missing.
        """
        caller = getattr(self.hook, f"minisgl_{group}")
        if group == "attention":
            kwargs.setdefault("build", lambda name: self.build(group, self.make(group, name), **kwargs))
        try:
            made = caller(config=config, **kwargs)
        except ImportError as error:
            raise ConfigError(f"{group}={self.name_of(group, config)}: {_missing_package(error)}") from error
        if made is None:
            who = self._owners.get((group, self.name_of(group, config)), "no plugin")
            raise ConfigError(
                f"No plugin builds {group}={self.name_of(group, config)}: every minisgl_{group} hook returned None for "
                f"a {type(config).__name__} (registered by {who}). It needs a hook that does "
                f"`if isinstance(config, {type(config).__name__}): return …`."
            )
        return made

    def make(self, group: str, name: str) -> Any:
        """A config object of that name with its default values. Raises `ConfigError` for an unknown name."""
        schema = self.schema(group, name)
        missing = [f"{group}.{f.name}" for f in fields(schema) if f.default is MISSING and f.default_factory is MISSING]
        if missing:
            raise ConfigError(f"{group}={name} needs a value for {', '.join(missing)}: it has no default.")
        return schema()

    def schema(self, group: str, name: str) -> type:
        """The dataclass behind ``group=name``. Raises `ConfigError` with the names there are."""
        if group not in self.configs:
            raise ConfigError(f"There is no group {group!r}{near(group, self.configs)} Groups: {', '.join(GROUPS)}.")
        names = self.configs[group]
        if name not in names:
            known = ", ".join(sorted(names)) or "none is loaded"
            raise ConfigError(f"{group}={name}: there is no such {group}{near(name, names)} Known: {known}.")
        return names[name]

    def name_of(self, group: str, config: Any) -> str:
        """The name under which a config object's dataclass was registered; its class name where it was not."""
        for name, schema in self.configs.get(group, {}).items():
            if type(config) is schema:
                return name
        return "null" if config is None else type(config).__name__

    def models(self) -> dict[str, type]:
        """Architecture name → model class, over all plugins. Raises `ConfigError` where two claim one name."""
        found: dict[str, type] = {}
        for implementation in self._manager.hook.minisgl_models.get_hookimpls():
            others = [p for p in self._manager.get_plugins() if p is not implementation.plugin]
            for mapping in self._manager.subset_hook_caller("minisgl_models", others)():
                for name in mapping:
                    self._claim(("models", name), implementation.plugin_name)
                found.update(mapping)
        return found

    def compose(self, overrides: Sequence[str] = ()) -> Config:
        """The options that the words ``key=value`` describe, over the defaults. Raises `ConfigError`."""
        from minisgl.compose import compose

        return compose(self, overrides)


# ---- finding and importing ---------------------------------------------------------------------------


def _find_file(word: str) -> Path:
    path = Path(word).expanduser()
    if path.is_dir():
        files = sorted(p.name for p in path.glob("*.py"))
        raise ConfigError(
            f"plugins={word} is a folder. Name a file in it{': ' + ', '.join(files[:5]) if files else ''}."
        )
    if not path.is_file():
        beside = path.parent if path.parent.is_dir() else Path()
        guess = near(path.name, [p.name for p in beside.glob("*.py")])
        raise ConfigError(f"plugins={word}: there is no such file (looked in {beside.resolve()}){guess}")
    return path.resolve()


def _import_file(path: Path, word: str) -> ModuleType:
    """The file as a module whose name depends on its path alone, so that every process gives its classes one name."""
    stem = re.sub(r"\W", "_", path.stem)
    name = f"minisgl_plugin_{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins={word} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise ConfigError(f"plugins={word}: {_import_failure(error, path)}") from error
        raise
    return module


def _import_module(name: str, label: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{label}: there is no module {name!r}. Give the path of a Python file (my_plugin.py), or the name of "
                "an installed module."
            ) from error
        raise ConfigError(f"{label}: {_missing_package(error)}") from error
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
    what = _missing_package(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    return f"importing it failed at line {line}: {what}"


def _missing_package(error: ImportError) -> str:
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
    return f"it needs the package {package!r}, which is not installed. Try: {command}"


# ---- what pluggy lets pass ---------------------------------------------------------------------------


def near(word: str, words: Iterable[str]) -> str:
    """``. Did you mean x?``, or ``.`` where nothing is near."""
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.6)
    return f". Did you mean {close[0]}?" if close else "."


def _hook_classes(module: ModuleType) -> list[type]:
    """Classes of the module that have hooks as methods: each host makes its own object of them, to keep state in."""
    own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    return [c for c in own if any(hasattr(getattr(c, n, None), MARK) for n in dir(c))]


def _instance(cls: type, label: str) -> object:
    try:
        return cls()
    except TypeError as error:
        raise ConfigError(
            f"{label}: {cls.__name__} has hooks as methods, so each host makes one {cls.__name__}() without arguments, "
            f"and that failed: {error}."
        ) from error


def _check_hooks(part: object, label: str) -> list[str]:
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


def _check_options(yielded: Any, label: str) -> list[tuple[str, str, type]]:
    if not isinstance(yielded, Iterable):
        raise ConfigError(f"{label}: minisgl_configs must yield (group, name, dataclass), it returned {yielded!r}.")
    options = []
    for item in yielded:
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


# ---- MINISGL_TRACE_HOOKS ----------------------------------------------------------------------------


def _print_call(hook_name: str, hook_impls: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]) -> None:
    arguments = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in kwargs.items())
    who = ", ".join(impl.plugin_name for impl in reversed(hook_impls)) or "nobody"
    print(f"hook [{os.getpid()}] {hook_name}({arguments}) calls {who}", file=sys.stderr, flush=True)


def _print_result(
    outcome: pluggy.Result[Any], hook_name: str, hook_impls: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]
) -> None:
    result = outcome.exception or outcome.get_result()
    print(f"hook [{os.getpid()}] {hook_name} -> {reprlib.repr(result)}", file=sys.stderr, flush=True)
