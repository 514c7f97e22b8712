"""`PluginManager`: the plugins of one engine. It loads them, and calls their hooks to build the engine's parts.

A built-in plugin is loaded when it is needed: the module ``minisgl.plugins.cache.radix`` when an option says
``cache=radix``. The functions that find and check a plugin are in `minisgl.plugin_manager.discovery`.
`minisgl.options.compose` builds a `Config` from the arguments of a command line.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import logging
import os
import reprlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import pluggy

from minisgl import hooks
from minisgl.config import GROUPS, OPTION_PLUGINS, Config, ConfigError
from minisgl.plugin_manager.call_counts import Calls, count_calls, count_method_calls, counting_subclass
from minisgl.plugin_manager.discovery import (
    HOOKS,
    check_hooks,
    check_made,
    check_options,
    exists,
    find_file,
    has_hooks,
    hook_classes,
    import_file,
    import_module,
    instantiate,
    missing_package,
    near,
    submodules,
)
from minisgl.plugin_manager.early import early_functions
from minisgl.plugin_manager.failures import PluginError, described, mark
from minisgl.plugin_manager.observer_metrics import ObserverMetrics
from minisgl.plugin_manager.renamed import ADDED_ARGUMENTS, ADDED_METHODS, FACTORY_HOOKS
from minisgl.utils.lazy import lazy

if TYPE_CHECKING:
    from minisgl.core import EngineSpec

__all__ = [
    "ConfigError",
    "Plugin",
    "PluginManager",
    "decode_config",
    "decode_part",
    "early_of",
    "encode_config",
    "options_of",
    "plugins_of",
]

log = logging.getLogger(__name__)

BUILT_IN = "minisgl.plugins"
"""The package of the built-in plugins: the part ``group=name`` is registered by the module ``<group>.<name>`` in it."""


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


class _PartMetrics:
    """Exports the metrics of a part of the engine, which has a method ``metrics``."""

    def __init__(self, part: Any):
        self.part = part

    @hooks.hookimpl
    def minisgl_metrics(self) -> str:
        text: str = self.part.metrics()
        return text


class PluginManager:
    """The plugins of one engine.

    Two plugin managers in one process share the imported modules, and therefore the plugins' classes. They share no
    other state.
    """

    def __init__(self, *, light: bool = False):
        self.light = light
        self.plugins: list[Plugin] = []
        self.user_plugins: list[str] = []
        """The plugins that ``plugins=`` named, as absolute paths and module names. Worker processes load them too."""
        self.configs: dict[str, dict[str, type]] = {group: {} for group in GROUPS}
        """Group → name → options dataclass, of the plugins that are loaded so far."""
        self.calls: dict[str, Calls] = {}
        """Plugin name → call counts of its hooks and methods. Only plugins that are not built in are counted."""
        self._owners: dict[tuple[str, str], str] = {}
        self._observers: list[object] | None = None  # from `minisgl_observer`; None before `observe` and after `close`
        self._loading = threading.RLock()
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        self._metrics = ObserverMetrics(self._manager)
        if hooks.printed():
            self._manager.add_hookcall_monitoring(_print_call, _print_result)

    @classmethod
    def load(cls, plugins: Sequence[str] = (), *, light: bool = False) -> PluginManager:
        """Return a plugin manager with the user's plugins. Raise `ConfigError` if one of them can't be loaded.

        These are the installed plugins (entry points of the group ``minisgl``), and ``plugins``, which are Python files
        or module names. Built-in plugins are loaded when they are needed. ``light`` is for processes that compute
        nothing (the API server, the tokenizers): `models` loads no built-in model, and ``import torch`` in a plugin
        loads torch only at its first use.
        """
        manager = cls(light=light)
        if light:
            lazy("torch")
        for entry in importlib.metadata.entry_points(group=hooks.PROJECT):
            origin = f"{entry.name} (installed by {entry.dist.name if entry.dist else 'an unknown package'})"
            manager._add(import_module(entry.module, origin), "entry point")
        for word in plugins:
            manager.add(word)
        return manager

    def load_built_in(self, kind: str, name: str) -> bool:
        """Load the built-in plugin ``plugins/<kind>/<name>``. Return whether there is one.

        There is none either if it needs a file of ``plugins`` that was deleted.
        """
        label = f"{BUILT_IN}.{kind}.{name}"
        if not exists(label):
            return False
        try:
            module = import_module(label, label)
        except ConfigError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and str(missing.name).startswith(f"{BUILT_IN}."):
                return False
            raise
        with self._loading:  # the ranks of a test are threads with one plugin manager
            if has_hooks(module):  # a module without hooks is code that parts share
                self._add(module, "built-in")
        return True

    def load_all(self, kind: str = "") -> None:
        """Load all built-in plugins of a kind, or of every kind: for ``--help`` and other lists of what there is."""
        for each in [kind] if kind else submodules(BUILT_IN):
            if not (each == "models" and self.light):
                for name in submodules(f"{BUILT_IN}.{each}"):
                    self.load_built_in(each, name)

    def load_for_options(self, config: Config) -> None:
        """Load the built-in plugins of options that are set and are no parts (`OPTION_PLUGINS`)."""
        default = Config()
        for option, (kind, name) in OPTION_PLUGINS.items():
            if getattr(config, option) != getattr(default, option) and not self.load_built_in(kind, name):
                raise ConfigError(f"The option {option} needs the plugin plugins/{kind}/{name}, which is missing.")

    @property
    def hook(self) -> pluggy.HookRelay:
        """Pluggy's hook relay: ``manager.hook.minisgl_request_added(req=…, now=…)`` calls that hook of all plugins."""
        return self._manager.hook

    def add(self, word: str) -> Plugin:
        """Load a plugin from a file path or a module name, and return it.

        A file that is loaded already is not loaded again. Raise `ConfigError` if the plugin can't be loaded.
        """
        if not word or not isinstance(word, str):
            raise ConfigError(f"plugins={word!r}: write the path of a Python file, or the name of a module.")
        if word.endswith(".py") or os.sep in word or Path(word).is_file():
            path = find_file(word)
            for plugin in self.plugins:
                if plugin.path == path:
                    self._remember(str(path), plugin)
                    return plugin
            module = import_file(path, word)
            try:
                plugin = self._add(module, "file", word)
            except ConfigError:
                del sys.modules[module.__name__]  # so that a later `add` reads the corrected file
                raise
            self._remember(str(path), plugin)
        else:
            plugin = self._add(import_module(word, f"plugins={word}"), "module", word)
            self._remember(word, plugin)
        return plugin

    def _remember(self, word: str, plugin: Plugin) -> None:
        if word not in self.user_plugins and plugin.source in ("file", "module"):
            self.user_plugins.append(word)

    def _add(self, module: ModuleType, source: str, label: str = "") -> Plugin:
        name = label or module.__name__
        path = Path(module.__file__ or "").resolve()
        for plugin in self.plugins:
            if plugin.module is module or plugin.path == path:
                return plugin
        parts = [module, *(instantiate(cls, name) for cls in hook_classes(module))]
        found = {hook for part in parts for hook in check_hooks(part, name)}
        if not found:
            raise ConfigError(
                f"{name} has no hook, so it would do nothing. A hook is a function with @hookimpl above it "
                f"(`from minisgl import hookimpl`), named as in minisgl/hooks.py: {', '.join(HOOKS[:8])}, …"
            )
        options: list[tuple[str, str, type]] = []
        before = list(self._manager.get_plugins())
        for part in parts:
            self._manager.register(part, name=name if part is module else f"{name}:{type(part).__name__}")
        if "minisgl_configs" in found:
            for yielded in self._manager.subset_hook_caller("minisgl_configs", before)() or [None]:
                options += check_options(yielded, name)
        for group, choice, schema in options:
            self._claim((group, choice), name)
            if self.configs[group].setdefault(choice, schema) is not schema:
                raise ConfigError(f"{name} claims {group}={choice} twice. Give one of the two another name.")
        digest = module.__dict__.get("__sha256__") or hashlib.sha256(path.read_bytes()).hexdigest()
        plugin = Plugin(module.__name__, source, path, module, tuple(sorted(found)), tuple(options), digest)
        self.plugins.append(plugin)
        if source != "built-in":
            mark(module, str(path))
            self.calls[plugin.name] = Calls(plugin=str(path))
            for part in parts:
                self._count_hooks(part, self.calls[plugin.name])
        return plugin

    def _count_hooks(self, part: object, calls: Calls) -> None:
        for caller in self._manager.get_hookcallers(part) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is part:
                    implementation.function = count_calls(  # type: ignore[misc]
                        implementation.function, calls, caller.name
                    )

    def _claim(self, choice: tuple[str, str], plugin: str) -> None:
        """Record that ``plugin`` registers the choice (group, name). Raise `ConfigError` if another plugin has it."""
        group, name = choice
        built_in = f"{BUILT_IN}.{group}.{name}"
        owner = self._owners.setdefault(choice, built_in if exists(built_in) else plugin)
        if owner != plugin:
            label = f"the architecture {name}" if group == "models" else f"{group}={name}"
            raise ConfigError(f"{plugin} and {owner} both claim {label}. Give one of them another name.")

    # ---- building ------------------------------------------------------------------------------------

    def build(self, group: str, config: Any, **given: Any) -> Any:
        """Return the part of an engine that ``config``, the options object of ``group``, builds.

        ``given`` are the arguments of its method ``build`` (`minisgl.hooks.PARTS`), of which it takes some.
        ``local_size`` has a default. Raise `ConfigError` if the object can't build the part, if it raises ValueError or
        SystemExit, if a package that the plugin needs is not installed, or if it returns something else than a part of
        the group.
        """
        given.setdefault("build_other", lambda name: self.build(group, self.make(group, name), **given))
        if group == "communicator":
            given.setdefault("local_size", given["size"])  # all ranks are on one machine
        name = self.name_of(group, config)
        calls = self.calls.get(type(config).__module__)
        try:
            if not hasattr(config, "build"):
                made = self._build_with_hook(group, config, given)
            else:
                taken = {argument: given[argument] for argument in list(inspect.signature(config.build).parameters)}
                build = config.build if calls is None else count_calls(config.build, calls, "build")
                made = build(**taken)
        except ImportError as error:
            raise ConfigError(f"{group}={name}: {missing_package(error)}") from error
        except (ValueError, PluginError) as error:
            raise ConfigError(f"{group}={name}: {error}") from error
        if not isinstance(made, type):
            self._add_methods(group, name, made)
        check_made(group, made, f"{group}={name}")
        if calls is not None:
            count_method_calls(made, calls)
        if hasattr(made, "metrics") and not self._exports(made):  # else `build_other` built it
            self._manager.register(_PartMetrics(made))
        if hooks.printed():
            print(f"build [{os.getpid()}] {group}={name} -> {reprlib.repr(made)}", file=sys.stderr, flush=True)
        return made

    def _exports(self, made: Any) -> bool:
        """Return whether the metrics of a part are exported already."""
        return any(isinstance(p, _PartMetrics) and p.part is made for p in self._manager.get_plugins())

    def _add_methods(self, group: str, name: str, made: Any) -> None:
        """Give a part of a plugin for minisgl 0.2 the methods that such parts have since 0.3, and log a warning.

        Raise `ConfigError` if it can't get the methods.
        """
        methods, module, base = ADDED_METHODS.get(group, ((), "", ""))
        kind: type = type(made)
        label = f"{group}={name}"
        for method, arguments in ADDED_ARGUMENTS.get(group, {}).items():
            own = list(inspect.signature(getattr(made, method)).parameters) if hasattr(made, method) else arguments
            if len(own) != len(arguments):
                raise ConfigError(
                    f"{label}: minisgl calls {kind.__name__}.{method}({', '.join(arguments)}) since 0.3, but yours "
                    f"takes ({', '.join(own)}): give your method another name (docs/upgrade-0.3.md)."
                )
        missing = [method for method in methods if not hasattr(kind, method)]
        if not missing:
            return
        advice = f"derive {kind.__name__} from {base}: `from {module} import {base}`"
        try:
            source = getattr(import_module(module, label), base)
            added = {method: getattr(source, method) for method in missing}
            made.__class__ = type(kind)(kind.__name__, (kind,), {**added, "__module__": kind.__module__})
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{label}: {kind.__name__} has no method {missing[0]}: {advice}.") from error
        log.warning(
            "%s=%s: %s has no method %s; %s (docs/upgrade-0.3.md)", group, name, kind.__name__, missing[0], advice
        )

    def _build_with_hook(self, group: str, config: Any, given: Mapping[str, Any]) -> Any:
        """Call the hook with which a plugin for minisgl 0.2 builds its part. Raise `ConfigError` if it has none."""
        hook = next(hook for hook, built in FACTORY_HOOKS.items() if built == group)
        caller = getattr(self.hook, hook, None)
        made: list[Any] = [] if caller is None else caller(config=config, build=given["build_other"], **given)
        if not made:
            owner = self._owners.get((group, self.name_of(group, config)), "no plugin")
            raise ConfigError(
                f"The dataclass {type(config).__name__} (registered by {owner}) has no method `build`. Add `def "
                "build(self): return …`, which returns the part."
            )
        return made[0]

    def observe(self, config: Config, spec: EngineSpec) -> None:
        """Register the observers that the plugins' `minisgl_observer` hooks make for a new scheduler.

        A plugin manager has the observers of one scheduler at a time: those of an earlier scheduler are closed first.
        Raise `ConfigError` if a hook raises an exception, or returns an object without hooks.
        """
        self.close()
        self._observers = []
        self.load_for_options(config)
        try:
            made = self.hook.minisgl_observer(config=config, spec=spec)
        except ImportError as error:
            raise ConfigError(f"An observer can't be made: {missing_package(error)}") from error
        except Exception as error:
            raise ConfigError(f"An observer can't be made: {described(error)}") from error
        for observer in made:
            label = f"The observer {type(observer).__name__}"
            if not check_hooks(observer, label):
                raise ConfigError(f"{label}, which a minisgl_observer hook returned, has no method with @hookimpl.")
            self._manager.register(observer)
            self._observers.append(observer)
            calls = self.calls.get(type(observer).__module__)
            if calls is not None:
                self._count_hooks(observer, calls)

    def metrics(self) -> list[str]:
        """Return the metrics of the observers. Those of an observer with an error are left out, which is logged."""
        return self._metrics.texts()

    def close(self) -> None:
        """Call `minisgl_closed` at the end of a scheduler, and unregister the observers that were made for it.

        A second call does nothing.
        """
        if self._observers is None:
            return
        made, self._observers = self._observers, None
        try:
            self.hook.minisgl_closed()
        finally:
            for observer in made:
                self._manager.unregister(observer)

    def make(self, group: str, name: str) -> Any:
        """Return the config object of ``group=name`` with its default values.

        Raise `ConfigError` for an unknown name, or if an option has no default value.
        """
        schema = self.schema(group, name)
        missing = [f"{group}.{f.name}" for f in fields(schema) if f.default is MISSING and f.default_factory is MISSING]
        if missing:
            raise ConfigError(f"{group}={name} needs a value for {', '.join(missing)}: it has no default.")
        return schema()

    def schema(self, group: str, name: str) -> type:
        """Return the dataclass of ``group=name``, and load its plugin if that was not needed yet.

        Raise `ConfigError`, with the known names, for an unknown name.
        """
        if group not in self.configs:
            raise ConfigError(f"There is no group {group!r}{near(group, self.configs)} Groups: {', '.join(GROUPS)}.")
        found = self.find(group, name)
        if found is None:
            self.load_all(group)
            names = sorted(self.configs[group])
            known = ", ".join(names) or "none is loaded"
            raise ConfigError(f"{group}={name}: there is no such {group}{near(name, names)} Known: {known}.")
        return found

    def find(self, group: str, name: str) -> type | None:
        """Return the dataclass of ``group=name``, or None if there is none. Load its plugin if it is a built-in one."""
        if name not in self.configs[group]:
            self.load_built_in(group, name)
        return self.configs[group].get(name)

    def name_of(self, group: str, config: Any) -> str:
        """Return the name under which a config object's dataclass is registered, or its class name if it is not."""
        module, prefix = type(config).__module__, f"{BUILT_IN}.{group}."
        if module.startswith(prefix):
            self.load_built_in(group, module.removeprefix(prefix).partition(".")[0])
        for name, schema in self.configs.get(group, {}).items():
            if type(config) is schema:
                return name
        return "null" if config is None else type(config).__name__

    def models(self) -> dict[str, type]:
        """Return the model classes of all plugins by architecture name, those of all built-in plugins too.

        Raise `ConfigError` if two plugins have the same architecture name.
        """
        if not self.light:
            self.load_all("models")
        found: dict[str, type] = {}
        for implementation in self._manager.hook.minisgl_models.get_hookimpls():
            others = [p for p in self._manager.get_plugins() if p is not implementation.plugin]
            for mapping in self._manager.subset_hook_caller("minisgl_models", others)():
                if not isinstance(mapping, Mapping) or not all(isinstance(each, type) for each in mapping.values()):
                    raise ConfigError(
                        f"{implementation.plugin_name}: minisgl_models must return a mapping from the names of "
                        f"architectures to model classes; it returned {reprlib.repr(mapping)}."
                    )
                for name, model in mapping.items():
                    self._claim(("models", name), implementation.plugin_name)
                    calls = self.calls.get(model.__module__)
                    found[name] = model if calls is None else counting_subclass(model, calls)
        return found

    def call_counts(self) -> list[tuple[str, str, str, str, int]]:
        """Return the call counts of the plugins that are not built in.

        An item is: plugin name, path, SHA-256, hook or method, number of calls.
        """
        known = {plugin.name: plugin for plugin in self.plugins}
        return [
            (name, str(known[name].path), known[name].sha256, call, times)
            for name, calls in self.calls.items()
            for call, times in sorted(calls.copy().items())
        ]


# ---- for worker processes ---------------------------------------------------------------------------


def encode_config(config: Config, manager: PluginManager) -> bytes:
    """Return a config as MessagePack bytes, for a worker process. A group's object is encoded as its name and values.

    Raise `ConfigError` if the dataclass of a group's object is not registered. Nothing is pickled.
    """
    plain = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in GROUPS}
    groups: dict[str, Any] = {}
    for group in GROUPS:
        value = getattr(config, group)
        if value is not None:
            name = manager.name_of(group, value)
            manager.schema(group, name)
            groups[group] = [name, asdict(value), *early_functions(value)]
    return msgspec.msgpack.encode([manager.user_plugins, plain, groups], enc_hook=str)


def plugins_of(data: bytes) -> list[str]:
    """Return the plugins that a worker process must load (`PluginManager.load`) before it decodes the config."""
    plugins: list[str] = msgspec.msgpack.decode(data)[0]
    return plugins


def options_of(data: bytes, *names: str) -> list[Any]:
    """Return the values of options that belong to no plugin group, from a config that `encode_config` encoded."""
    plain = msgspec.msgpack.decode(data)[1]
    return [plain[name] for name in names]


def early_of(data: bytes) -> list[str]:
    """Return the functions that a worker process calls first of all (`started_early`), from `encode_config`'s bytes."""
    return [function for _, _, *functions in msgspec.msgpack.decode(data)[2].values() for function in functions]


def decode_config(data: bytes, manager: PluginManager) -> Config:
    """Return the config that `encode_config` encoded. ``manager`` must have loaded the same plugins."""
    _, plain, groups = msgspec.msgpack.decode(data)
    config = msgspec.convert(plain, Config)
    for group, part in groups.items():
        setattr(config, group, _options_of_part(part, manager, group))
    return config


def decode_part(data: bytes, manager: PluginManager, group: str) -> Any:
    """Return the options of one group, or None if it has none, from a config that `encode_config` encoded.

    Of the built-in plugins, only the one of this group is loaded. Raise `ConfigError` if there is no such part.
    """
    groups = msgspec.msgpack.decode(data)[2]
    return _options_of_part(groups[group], manager, group) if group in groups else None


def _options_of_part(part: Sequence[Any], manager: PluginManager, group: str) -> Any:
    """Return the options of a part of ``group``, which `encode_config` encoded as ``part``: its name and its values."""
    name, values, *_ = part
    return msgspec.convert(values, manager.schema(group, name), dec_hook=_from_text)


def _from_text(kind: type, value: Any) -> Any:
    return kind(value)  # such as pathlib.Path, which `encode_config` encoded as text


# ---- MINISGL_TRACE_HOOKS ----------------------------------------------------------------------------


def _print_call(hook_name: str, hook_impls: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]) -> None:
    arguments = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in kwargs.items())
    plugins = ", ".join(impl.plugin_name for impl in reversed(hook_impls)) or "no plugin"
    print(f"hook [{os.getpid()}] {hook_name}({arguments}) calls {plugins}", file=sys.stderr, flush=True)


def _print_result(
    outcome: pluggy.Result[Any], hook_name: str, hook_impls: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]
) -> None:
    result = outcome.exception or outcome.get_result()
    print(f"hook [{os.getpid()}] {hook_name} -> {reprlib.repr(result)}", file=sys.stderr, flush=True)
