"""`CheckingRegistrar`: checks of plugins that are not built in, and the counts of their calls.

The checks find mistakes that pluggy and Hydra would silently ignore. Every error is a `ConfigError` that says what was
given, what is wrong with it, and what to do.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from minisgl import hooks
from minisgl.config import GROUPS, ConfigError
from minisgl.plugin_manager.discovery import (
    BUILT_IN,
    HOOKIMPL_ATTRIBUTE,
    HOOKS,
    Plugin,
    Registered,
    Registrar,
    exists,
    hook_classes,
    near,
    printed,
    sha256,
    taken,
)
from minisgl.plugin_manager.failures import named
from minisgl.plugins.external.call_counts import Calls, count_calls, count_method_calls, counting_subclass
from minisgl.plugins.external.failures import PluginError, ends_silently, mark
from minisgl.plugins.external.loading import load
from minisgl.plugins.external.metrics_text import checking_metrics
from minisgl.plugins.external.old_places import offer_old_places
from minisgl.plugins.external.parts import PARTS
from minisgl.plugins.external.printing import print_build, print_hooks
from minisgl.plugins.external.since_0_2 import (
    FACTORY_HOOKS,
    add_methods,
    build_with_hook,
    warn_of_factory_hook,
)


class CheckingRegistrar(Registrar):
    """Refuses a plugin with a mistake, with advice, and counts the calls of its hooks and of the parts that it builds.

    Only plugins that are not built in are counted: the manager registers the built-in ones itself.
    """

    def __init__(self, manager: pluggy.PluginManager):
        super().__init__(manager)
        self._calls: dict[str, tuple[str, Calls]] = {}  # by the name of the plugin's module: its SHA-256, and the calls
        self._owners: dict[tuple[str, str], str] = {}  # (group, name) → the plugin that registered it
        offer_old_places()
        if printed():
            print_hooks(manager)

    def load(self, word: str | EntryPoint, loaded: Sequence[Plugin]) -> tuple[ModuleType, str]:
        """Import the file or module."""
        module, source = load(word, loaded)
        mark(module, str(_path(module)))
        return module, source

    def add(self, module: ModuleType, label: str) -> Registered:
        """Check the plugin, and count the calls of its hooks. If it has a mistake, nothing of it is left."""
        before = self.pluggy.get_plugins()
        try:
            found, yielded = super().add(module, label)
            if not found:
                raise ConfigError(
                    f"{label} has no hook, so it would do nothing. A hook is a function with @hookimpl above it "
                    f"(`from minisgl import hookimpl`), named as in minisgl/hooks.py: {', '.join(HOOKS[:8])}, …"
                )
            for group, choice, schema in yielded:
                self._claim(group, choice, label)
                if any(other[:2] == (group, choice) and other[2] is not schema for other in yielded):
                    raise ConfigError(f"{label} claims {group}={choice} twice. Give one of the two another name.")
        except ConfigError:
            for part in self.pluggy.get_plugins() - before:
                self.pluggy.unregister(part)
            if "__sha256__" in module.__dict__:
                del sys.modules[module.__name__]  # so that the corrected file can be loaded
            raise
        calls = Calls(plugin=str(_path(module)))
        self._calls[module.__name__] = sha256(module), calls
        for part in self.pluggy.get_plugins() - before:
            self._count(part, calls)
        return found, yielded

    def _claim(self, group: str, name: str, plugin: str) -> None:
        """Record that ``plugin`` registers the choice (group, name). Raise `ConfigError` if another plugin has it."""
        built_in = f"{BUILT_IN}.{group}.{name}"
        owner = self._owners.setdefault((group, name), built_in if exists(built_in) else plugin)
        if owner != plugin:
            label = f"the architecture {name}" if group == "models" else f"{group}={name}"
            raise ConfigError(f"{plugin} and {owner} both claim {label}. Give one of them another name.")

    def objects(self, module: ModuleType, label: str) -> list[object]:
        """Raise `ConfigError` if a constructor needs arguments, or fails."""
        return [instantiate(cls, label) for cls in hook_classes(module)]

    def register(self, part: object, label: str, name: str | None = None) -> None:
        """Check the hooks of ``part`` first. Metrics that Prometheus could not read are an error of the observer."""
        check_hooks(part, label)
        try:
            super().register(part, label, name)
        except pluggy.PluginValidationError as error:
            raise ConfigError(f"{label}: {error}") from error
        for implementation in self._implementations(part):
            if implementation.function.__name__ == "minisgl_metrics":
                implementation.function = checking_metrics(implementation.function)  # type: ignore[misc]
        if type(part).__module__ in self._calls:  # an observer that a counted plugin built
            self._count(part, self._calls[type(part).__module__][1])

    def options(self, yielded: Iterable[Any], label: str) -> tuple[tuple[str, str, type], ...]:
        """Check each item. A hook without `yield` gave nothing at all."""
        return tuple(option for each in list(yielded) or [None] for option in check_options(each, label))

    def build(self, group: str, config: Any, given: Mapping[str, Any], label: str) -> Any:
        """Check what was built. A plugin for minisgl 0.2 may build it with a hook."""
        calls = self._calls.get(type(config).__module__, (None, None))[1]
        if not hasattr(config, "build"):
            owner = "no plugin" if calls is None else calls.plugin
            made = build_with_hook(self.pluggy.hook, group, config, given, owner)
        elif calls is None:
            made = super().build(group, config, given, label)
        else:
            try:
                made = count_calls(config.build, calls, "build")(**taken(config.build, given))
            except PluginError as error:
                raise ConfigError(f"{label}: {error}") from error
        if not isinstance(made, type):
            add_methods(group, label, made)
        check_made(group, made)
        if calls is not None:
            count_method_calls(made, calls)
        if printed():
            print_build(label, made)
        return made

    def models(self, found: Any, label: str) -> Mapping[str, type]:
        """Check that ``found`` has model classes, and count the calls of their methods."""
        if not isinstance(found, Mapping) or not all(isinstance(each, type) for each in found.values()):
            raise ConfigError(
                f"{label}: minisgl_models must return a mapping from the names of architectures to model classes; it "
                f"returned {reprlib.repr(found)}."
            )
        for name in found:
            self._claim("models", name, label)
        counted = {name: self._calls.get(model.__module__) for name, model in found.items()}
        return {
            name: model if (entry := counted[name]) is None else counting_subclass(model, entry[1])
            for name, model in found.items()
        }

    def call_counts(self) -> list[tuple[str, str, str, str, int]]:
        """Return the counts of all plugins that are not built in."""
        return [
            (name, calls.plugin, digest, call, times)
            for name, (digest, calls) in self._calls.items()
            for call, times in sorted(calls.copy().items())
        ]

    def _implementations(self, part: object) -> list[pluggy.HookImpl]:
        callers = self.pluggy.get_hookcallers(part) or ()
        return [each for caller in callers for each in caller.get_hookimpls() if each.plugin is part]

    def _count(self, part: object, calls: Calls) -> None:
        for implementation in self._implementations(part):
            name = implementation.opts.get("specname") or implementation.function.__name__
            implementation.function = count_calls(implementation.function, calls, name)  # type: ignore[misc]


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


def check_hooks(part: object, label: str) -> None:
    """Raise `ConfigError` for a hook that pluggy would never call, or would call with an argument that does not exist.

    ``part`` is a module or an object.
    """
    module = part.__name__ if isinstance(part, ModuleType) else type(part).__module__
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
            warn_of_factory_hook(hook, label)
            continue
        if hook not in HOOKS:
            raise ConfigError(f"{label}: there is no hook {hook}{near(hook, HOOKS)} All of them: {', '.join(HOOKS)}.")
        allowed = list(inspect.signature(getattr(hooks, hook)).parameters)
        for argument in inspect.signature(getattr(part, name)).parameters:
            if argument not in allowed:
                raise ConfigError(
                    f"{label}: {name} takes {argument!r}, which this hook does not offer{near(argument, allowed)} "
                    f"It may take any of: {', '.join(allowed) or 'nothing'}."
                )


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
    "grammar": "constraint",
    "tool_parser": "reader",
    "reasoning_parser": "reader",
    "live": "add_routes",
}
"""Group → a method that every object of the group has. A cache that makes its own manager may lack it."""

MAY_BE_NONE = frozenset({"tokenizer", "tool_parser", "reasoning_parser", "live"})
"""The groups whose ``build`` may return None."""


def check_made(group: str, made: object) -> None:
    """Raise `ConfigError` if what ``build`` returned is a class, or is clearly no part of its group."""
    method = METHODS[group]
    if made is None and group in MAY_BE_NONE:
        return
    if isinstance(made, type):
        raise ConfigError(f"build returned the class {made.__name__}. Return an object of it.")
    if not callable(getattr(made, method, None)) and not (group == "cache" and hasattr(made, "make_manager")):
        raise ConfigError(
            f"build returned an object of the type {type(made).__name__}, which has no method {method!r}. "
            "minisgl/hooks.py says what it must return."
        )


def _check_build(group: str, schema: type, label: str) -> None:
    """Raise `ConfigError` if the method ``build`` of an options dataclass takes an argument that its group lacks."""
    build = getattr(schema, "build", None)
    if build is None:  # a plugin for minisgl 0.2, which builds the part with a hook
        return
    offered = [*PARTS[group].arguments, "build_other"]
    for argument in list(inspect.signature(build).parameters)[1:]:
        if argument not in offered:
            raise ConfigError(
                f"{label}: {schema.__name__}.build takes {argument!r}, which the group {group} does not offer"
                f"{near(argument, offered)} It may take any of: {', '.join(offered)}."
            )


def _path(module: ModuleType) -> Path:
    return Path(module.__file__ or "").resolve()
