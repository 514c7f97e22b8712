"""The plugin host: which plugins an engine has, what they add, and asking them to build things.

It knows no plugin by what it does: the built-in ones are one tuple of module names here. Finding and checking files
is the task of `minisgl.plugin_manager.discovery`; `minisgl.options.compose` makes a `Config` from words on a command
line.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import pluggy

from minisgl import hooks
from minisgl.config import GROUPS, Config, ConfigError
from minisgl.plugin_manager.call_counts import Calls, count_methods, counted_class, counting
from minisgl.plugin_manager.discovery import (
    HOOKS,
    check_hooks,
    check_options,
    find_file,
    hook_classes,
    import_file,
    import_module,
    instance,
    missing_package,
    near,
)
from minisgl.utils.lazy import lazy

if TYPE_CHECKING:
    from minisgl.core import EngineSpec

__all__ = ["BUILTINS", "ConfigError", "Plugin", "PluginManager", "decode_config", "encode_config", "plugins_of"]

BUILTINS = (
    "minisgl.plugins.attention.torch",
    "minisgl.plugins.attention.paged",
    "minisgl.plugins.attention.sparse",
    "minisgl.plugins.attention.flashinfer",
    "minisgl.plugins.attention.flash_attn",
    "minisgl.plugins.attention.trtllm",
    "minisgl.plugins.attention.hybrid",
    "minisgl.plugins.attention.auto",
    "minisgl.plugins.attention.triton",
    "minisgl.plugins.cache.naive",
    "minisgl.plugins.cache.radix",
    "minisgl.plugins.scheduler.static",
    "minisgl.plugins.scheduler.prefill_first",
    "minisgl.plugins.scheduler.decode_first",
    "minisgl.plugins.scheduler.mixed",
    "minisgl.plugins.moe.torch",
    "minisgl.plugins.moe.grouped",
    "minisgl.plugins.moe.auto",
    "minisgl.plugins.moe.triton",
    "minisgl.plugins.graph.none",
    "minisgl.plugins.graph.cuda",
    "minisgl.plugins.graph.auto",
    "minisgl.plugins.graph.simulated",
    "minisgl.plugins.graph.replay",
    "minisgl.plugins.communicator.auto",
    "minisgl.plugins.communicator.torch",
    "minisgl.plugins.communicator.nccl",
    "minisgl.plugins.communicator.ring",
    "minisgl.plugins.observer.metrics",
    "minisgl.plugins.observer.trace",
    "minisgl.plugins.models.llama",
    "minisgl.plugins.models.mistral",
    "minisgl.plugins.models.qwen2",
    "minisgl.plugins.models.qwen3",
    "minisgl.plugins.models.qwen3_plain",
    "minisgl.plugins.models.qwen3_moe",
)
MODELS = "minisgl.plugins.models."


@dataclass(frozen=True)
class Plugin:
    """One loaded plugin: what `python -m minisgl.plugins` prints of it."""

    name: str
    source: str  # "built-in", "entry point", "file" or "module"
    path: Path
    module: ModuleType
    hooks: tuple[str, ...]
    options: tuple[tuple[str, str, type], ...]  # (group, name, dataclass)
    sha256: str  # of the file as it was when it was loaded


class PluginManager:
    """The plugins of one engine. Two hosts in a process share modules, so classes are the same, and nothing else."""

    def __init__(self, *, light: bool = False):
        self.light = light
        self.plugins: list[Plugin] = []
        self.given: list[str] = []
        """What ``plugins=`` named, as a child process must be told it: absolute paths and module names."""
        self.configs: dict[str, dict[str, type]] = {group: {} for group in GROUPS}
        self.calls: dict[str, Calls] = {}
        """By name, the plugins that are not built in, and how often each of their hooks and methods was called."""
        self._owners: dict[tuple[str, str], str] = {}
        self._made: list[object] | None = None  # observers; None: no scheduler was built, or it has ended
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        if hooks.printed():
            self._manager.add_hookcall_monitoring(_print_call, _print_result)

    @classmethod
    def load(cls, plugins: Sequence[str] = (), *, light: bool = False) -> PluginManager:
        """A host with the built-in plugins, the installed ones (entry points of group ``minisgl``) and ``plugins``:
        Python files or module names. Raises `ConfigError`.

        ``light`` is for processes that compute nothing (the API server, the tokenizers): models are left out, and a
        plugin's ``import torch`` costs nothing until torch is used.
        """
        manager = cls(light=light)
        if light:
            lazy("torch")
        for name in BUILTINS:
            if not (light and name.startswith(MODELS)):
                manager._add(import_module(name, name), "built-in")
        for entry in importlib.metadata.entry_points(group=hooks.PROJECT):
            origin = f"{entry.name} (installed by {entry.dist.name if entry.dist else 'an unknown package'})"
            manager._add(import_module(entry.module, origin), "entry point")
        for word in plugins:
            manager.add(word)
        return manager

    @property
    def hook(self) -> pluggy.HookRelay:
        """pluggy's relay: ``host.hook.minisgl_request_added(req=…, now=…)`` calls every plugin's."""
        return self._manager.hook

    def add(self, word: str) -> Plugin:
        """Load one more plugin: a file's path or a module's name. The same file twice is one plugin."""
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
                del sys.modules[module.__name__]  # so that the file is read again once it is mended
                raise
            self._remember(str(path), plugin)
        else:
            plugin = self._add(import_module(word, f"plugins={word}"), "module", word)
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
        parts = [module, *(instance(cls, name) for cls in hook_classes(module))]
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
            self.calls[plugin.name] = Calls()
            for part in parts:
                self._count_hooks(part, self.calls[plugin.name])
        return plugin

    def _count_hooks(self, part: object, calls: Calls) -> None:
        for caller in self._manager.get_hookcallers(part) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is part:
                    implementation.function = counting(  # type: ignore[misc]
                        implementation.function, calls, caller.name
                    )

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
        if caller.spec is not None and "build" in caller.spec.argnames:
            kwargs.setdefault("build", lambda name: self.build(group, self.make(group, name), **kwargs))
        try:
            made = caller(config=config, **kwargs)
        except ImportError as error:
            raise ConfigError(f"{group}={self.name_of(group, config)}: {missing_package(error)}") from error
        except ValueError as error:
            raise ConfigError(f"{group}={self.name_of(group, config)}: {error}") from error
        if made is None:
            who = self._owners.get((group, self.name_of(group, config)), "no plugin")
            raise ConfigError(
                f"No plugin builds {group}={self.name_of(group, config)}: every minisgl_{group} hook returned None for "
                f"a {type(config).__name__} (registered by {who}). It needs a hook that does "
                f"`if isinstance(config, {type(config).__name__}): return …`."
            )
        calls = self.calls.get(type(config).__module__)
        if calls is not None:
            count_methods(made, calls)
        return made

    def observe(self, config: Config, spec: EngineSpec) -> None:
        """Let the observers listen that plugins make for a scheduler (`minisgl_observer`). One scheduler at a time:
        an earlier one's are closed first. Raises `ConfigError`."""
        self.close()
        self._made = []
        try:
            made = self.hook.minisgl_observer(config=config, spec=spec)
        except ImportError as error:
            raise ConfigError(f"An observer can't be made: {missing_package(error)}") from error
        for observer in made:
            label = f"The observer {type(observer).__name__}"
            if not check_hooks(observer, label):
                raise ConfigError(f"{label}, which a minisgl_observer hook returned, has no method with @hookimpl.")
            self._manager.register(observer)
            self._made.append(observer)
            calls = self.calls.get(type(observer).__module__)
            if calls is not None:
                self._count_hooks(observer, calls)

    def close(self) -> None:
        """The scheduler has ended: tell the observers, and forget those that were made for it. Twice is allowed."""
        if self._made is None:
            return
        made, self._made = self._made, None
        try:
            self.hook.minisgl_closed()
        finally:
            for observer in made:
                self._manager.unregister(observer)

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
                for name, model in mapping.items():
                    self._claim(("models", name), implementation.plugin_name)
                    calls = self.calls.get(model.__module__)
                    found[name] = model if calls is None else counted_class(model, calls)
        return found

    def called(self) -> list[tuple[str, str, str, str, int]]:
        """For each plugin that is not built in: its name, path and SHA-256, what was called of it, and how often."""
        known = {plugin.name: plugin for plugin in self.plugins}
        return [
            (name, str(known[name].path), known[name].sha256, call, times)
            for name, calls in self.calls.items()
            for call, times in sorted(calls.copy().items())
        ]


# ---- for child processes ----------------------------------------------------------------------------


def encode_config(config: Config, manager: PluginManager) -> bytes:
    """A config as bytes (MessagePack), each group's object by its name: nothing is pickled."""
    plain = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in GROUPS}
    groups: dict[str, Any] = {}
    for group in GROUPS:
        value = getattr(config, group)
        if value is not None:
            name = manager.name_of(group, value)
            manager.schema(group, name)
            groups[group] = [name, asdict(value)]
    return msgspec.msgpack.encode([manager.given, plain, groups], enc_hook=str)


def plugins_of(data: bytes) -> list[str]:
    """What a child must give `PluginManager.load` before it decodes the config."""
    return msgspec.msgpack.decode(data)[0]


def decode_config(data: bytes, manager: PluginManager) -> Config:
    """The inverse of `encode_config`, in a process whose host has loaded the same plugins."""
    _, plain, groups = msgspec.msgpack.decode(data)
    config = msgspec.convert(plain, Config)
    for group, (name, values) in groups.items():
        setattr(config, group, msgspec.convert(values, manager.schema(group, name), dec_hook=_from_text))
    return config


def _from_text(kind: type, value: Any) -> Any:
    return kind(value)  # pathlib.Path


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
