"""`PluginManager`: the plugins of one engine. It loads them, and calls their hooks to build the engine's parts.

A built-in plugin is loaded when it is needed: the module ``minisgl.plugins.cache.radix`` when an option says
``cache=radix``. The functions that find and check it are in `minisgl.plugin_manager.discovery`, those for plugins of
other people in `minisgl.plugins.external`. `minisgl.options.compose` builds a `Config` from a command line.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from minisgl import hooks
from minisgl.config import GROUPS, OPTION_PLUGINS, Config, ConfigError
from minisgl.plugin_manager.discovery import (
    BUILT_IN,
    Plugin,
    Registrar,
    exists,
    has_hooks,
    import_module,
    missing_package,
    near,
    printed,
    sha256,
    submodules,
)
from minisgl.plugin_manager.failures import described

if TYPE_CHECKING:
    from minisgl.core import EngineSpec
    from minisgl.message.link import Link

__all__ = ["BUILT_IN", "ConfigError", "Plugin", "PluginManager"]


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
        self._observers: list[object] | None = None  # from `minisgl_observer`; None before `observe` and after `close`
        self._loading = threading.RLock()
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        self._plain = Registrar(self._manager)
        self._registrar = self._plain
        """The registrar of plugins that are not built in, once there is one, and of what all plugins build."""
        if printed():
            self._use_external()

    @property
    def external_plugins(self) -> list[Plugin]:
        """The plugins that are not built in."""
        return [plugin for plugin in self.plugins if plugin.source != "built-in"]

    def _use_external(self) -> None:
        """Use the registrar of ``plugins/external`` from now on, if this folder was not deleted."""
        name = f"{BUILT_IN}.external.checking"
        if self._registrar is self._plain and exists(name):
            self._registrar = import_module(name, name).CheckingRegistrar(self._manager)

    @classmethod
    def load(cls, plugins: Sequence[str] = (), *, light: bool = False) -> PluginManager:
        """Return a plugin manager with the user's plugins. Raise `ConfigError` if one of them can't be loaded.

        These are the installed plugins (entry points of the group ``minisgl``), and ``plugins``, which are Python files
        or module names. Built-in plugins are loaded when they are needed. ``light`` is for processes that compute
        nothing (the API server, the tokenizers): `models` loads no built-in model, and ``import torch`` in a plugin
        loads torch only at its first use.
        """
        manager = cls(light=light)
        if light and exists(lazy := f"{BUILT_IN}.external.lazy"):
            import_module(lazy, lazy).lazy("torch")
        for word in (*importlib.metadata.entry_points(group=hooks.PROJECT), *plugins):
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
                self._add(module, "built-in", label)
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

    def add(self, word: str | importlib.metadata.EntryPoint) -> Plugin:
        """Load a plugin that is not built in, from a file path, a module name or an entry point, and return it.

        A file that is loaded already is not loaded again. Raise `ConfigError` if the plugin can't be loaded.
        """
        self._use_external()
        module, source = self._registrar.load(word, self.plugins)
        plugin = self._add(module, source, word if isinstance(word, str) else module.__name__)
        name = str(plugin.path) if source == "file" else str(word)
        if name not in self.user_plugins and plugin.source in ("file", "module"):
            self.user_plugins.append(name)
        return plugin

    def _add(self, module: ModuleType, source: str, label: str) -> Plugin:
        path = Path(module.__file__ or "").resolve()
        for plugin in self.plugins:
            if plugin.module is module or plugin.path == path:
                return plugin
        found, options = (self._plain if source == "built-in" else self._registrar).add(module, label)
        for group, choice, schema in options:
            self.configs[group][choice] = schema
        plugin = Plugin(module.__name__, source, path, module, found, options, sha256(module))
        self.plugins.append(plugin)
        return plugin

    # ---- building ------------------------------------------------------------------------------------

    def build(self, group: str, config: Any, **given: Any) -> Any:
        """Return the part of an engine that ``config``, the options object of ``group``, builds.

        ``given`` are the arguments of its method ``build`` (`plugins/external/parts.py`), of which it takes some.
        ``local_size`` has a default. Raise `ConfigError` if the object can't build the part, if it raises ValueError or
        SystemExit, if a package that the plugin needs is not installed, or if it returns something else than a part of
        the group.
        """
        given.setdefault("build_other", lambda name: self.build(group, self.make(group, name), **given))
        if group == "communicator":
            given.setdefault("local_size", given["size"])  # all ranks are on one machine
        label = f"{group}={self.name_of(group, config)}"
        try:
            made = self._registrar.build(group, config, given, label)
        except ImportError as error:
            raise ConfigError(f"{label}: {missing_package(error)}") from error
        except ValueError as error:
            raise ConfigError(f"{label}: {error}") from error
        if hasattr(made, "metrics") and not self._exports(made):  # else `build_other` built it
            self._registrar.register(_PartMetrics(made), label)
        return made

    def _exports(self, made: Any) -> bool:
        """Return whether the metrics of a part are exported already."""
        return any(isinstance(p, _PartMetrics) and p.part is made for _, p in self._manager.list_name_plugin())

    def observe(self, config: Config, spec: EngineSpec, link: Link | None = None) -> None:
        """Register the observers that the plugins' `minisgl_observer` hooks make for a new scheduler.

        A plugin manager has the observers of one scheduler at a time: those of an earlier scheduler are closed first.
        Raise `ConfigError` if a hook raises an exception, or returns an object without hooks.
        """
        self.close()
        self._observers = []
        self.load_for_options(config)
        try:
            made = self.hook.minisgl_observer(config=config, spec=spec, link=link)
        except ImportError as error:
            raise ConfigError(f"An observer can't be made: {missing_package(error)}") from error
        except Exception as error:
            raise ConfigError(f"An observer can't be made: {described(error)}") from error
        for observer in made:
            label = f"The observer {type(observer).__name__}"
            self._registrar.register(observer, label)
            if not self._manager.get_hookcallers(observer):
                raise ConfigError(f"{label}, which a minisgl_observer hook returned, has no method with @hookimpl.")
            self._observers.append(observer)

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
        for implementation in self.hook.minisgl_models.get_hookimpls():
            found |= self._registrar.models(implementation.function(), implementation.plugin_name)
        return found

    def call_counts(self) -> list[tuple[str, str, str, str, int]]:
        """Return (plugin name, path, SHA-256, hook or method, number of calls) of the plugins that are not built in."""
        return self._registrar.call_counts()
