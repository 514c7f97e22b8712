"""`compose`: builds a `Config` from the arguments of a command line. Only this file uses Hydra.

This module knows Hydra, the dataclasses of the plugins and the files in ``conf/``. It turns Hydra's errors into
`ConfigError`. The result consists of plain dataclasses. Hydra creates no ``outputs/`` folder, sets up no logging, does
not change the working directory, and its global state is the same afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import typing
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from minisgl.config import GROUPS, PLAIN, ROUTER_GROUPS, Config, ConfigError
from minisgl.options.describe import (
    PRESETS,
    Option,
    choice_of,
    core_options,
    group_options,
    options_of,
    presets,
)
from minisgl.plugin_manager.discovery import exists, import_module, near
from minisgl.plugin_manager.failures import described, ends_silently, is_from_plugin
from minisgl.plugin_manager.manager import BUILT_IN, PluginManager
from minisgl.plugin_manager.renamed import RENAMED_OPTIONS, RENAMED_SINCE
from minisgl.utils.version import __version__

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig

C = typing.TypeVar("C", bound=Config)
PROGRAM = "minisgl"
FLAGS = MappingProxyType(
    {
        "--complete": "completion",
        "--shell-completion": "completion",
        "-sc": "completion",
        "--help": "help",
        "-h": "help",
        "help": "help",
        "--cfg": "print_config",
        "-c": "print_config",
    }
)
"""Flag of the command line → the module in ``plugins/command/`` whose ``run(words, kind, usage)`` handles it."""
_HYDRA = threading.Lock()
"""The lock of Hydra's global state: one composition at a time."""


def split_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files and modules that ``plugins=`` arguments name, and the other arguments.

    ``words`` are the arguments of a command line, such as ``tp=2`` or ``plugins=[a.py,b.py]``.
    """
    named: list[str] = []
    rest: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") != "plugins":
            rest.append(word)
            continue
        inside = re.fullmatch(r"\[(.*)\]", value.strip(), re.DOTALL)
        names = inside[1].split(",") if inside else [value]
        named += [stripped for name in names if (stripped := name.strip().strip("'\""))]
    return named, rest


@typing.overload
def compose(manager: PluginManager, overrides: Sequence[str] = ...) -> Config: ...


@typing.overload
def compose(manager: PluginManager, overrides: Sequence[str], kind: type[C]) -> C: ...


def compose(manager: PluginManager, overrides: Sequence[str] = (), kind: type[Config] = Config) -> Config:
    """Return the config with the default options, changed by ``overrides`` of the form ``key=value``.

    The plugins that ``plugins=`` overrides name are loaded into ``manager`` first. ``kind`` is `Config`, or a dataclass
    that adds options to it. Raise `ConfigError` for a wrong override.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    composed = _compose(manager, overrides, kind)
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        _explain(error, manager, overrides)
    except (TypeError, ValueError) as error:  # a __post_init__ that checks its values
        raise ConfigError(f"{error}") from error
    assert isinstance(config, kind)
    for group, name in PLAIN.items():
        if getattr(config, group) is None:
            setattr(config, group, manager.make(group, name))
    config.plugins = list(manager.user_plugins)
    config.check()
    return config


def _compose(manager: PluginManager, overrides: Sequence[str], kind: type[Config]) -> DictConfig:
    named, words = split_plugins(overrides)
    for name in named:
        manager.add(name)
    words = [_checked(manager, word, words, kind) for word in words]
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    own = tuple(option for plugin in manager.plugins if plugin.source != "built-in" for option in plugin.options)
    try:
        return _compose_with_hydra(tuple(words), kind, _Loader(own, weakref.proxy(manager)))  # type: ignore[arg-type]
    except (HydraException, OmegaConfBaseException) as error:
        _explain(error, manager, overrides)


@dataclass(frozen=True)
class _Loader:
    """Finds the dataclass of a part when Hydra asks for it. Two of them are equal if they find the same ones."""

    own: tuple[tuple[str, str, type], ...]  # (group, name, dataclass) of the plugins that are not built in
    manager: PluginManager = field(compare=False)  # a weak reference: the results that are kept hold no manager


class _Group(dict[str, Any]):
    """The configs of one group in Hydra's store. A plugin is loaded when Hydra looks up the name of its part."""

    def __init__(self, manager: PluginManager, group: str, store: ConfigStore):
        self._manager, self._group, self._store = manager, group, store

    def __deepcopy__(self, memo: object) -> _Group:  # Hydra copies its state
        return self

    def __contains__(self, key: object) -> bool:
        name = str(key).removesuffix(".yaml")
        if key not in self.keys() and self._manager.find(self._group, name) is not None:
            _store(self._store, self._group, name, self._manager.schema(self._group, name))
        return key in self.keys()


@functools.lru_cache(maxsize=16)
def _compose_with_hydra(words: tuple[str, ...], kind: type[Config], loader: _Loader) -> DictConfig:
    """Return the composed options, not yet as dataclasses.

    The last results are kept, because Hydra takes 0.1 s, and programs compose the same words again and again: labs,
    benchmarks, a proposer with a model of its own. Callers must not change the result.
    """
    from hydra import compose, initialize_config_module

    with _private_hydra() as store:
        store.store(name="minisgl_schema", node=kind)
        store.repo |= {group: _Group(loader.manager, group, store) for group in GROUPS}
        with initialize_config_module("minisgl.conf", version_base="1.3"):
            return compose(kind.defaults_file, list(words))


@contextlib.contextmanager
def _private_hydra() -> Iterator[ConfigStore]:
    """Replace Hydra's singletons by new ones inside the context, and yield the new config store.

    So a program that uses Hydra itself, or another plugin manager, finds its own Hydra state unchanged.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    with _HYDRA:
        Plugins.instance()  # puts Hydra's own configs into the store, once in a process
        outer_repo = ConfigStore.instance().repo
        outer_instances = Singleton._instances
        replaced = (ConfigStore, GlobalHydra, JobRuntime, VersionBase)
        Singleton._instances = {kind: one for kind, one in outer_instances.items() if kind not in replaced}
        try:
            store = ConfigStore.instance()
            store.repo = {name: node for name, node in outer_repo.items() if name.startswith(("hydra", "_"))}
            yield store
        finally:
            Singleton._instances = outer_instances


def _store(store: Any, group: str, name: str, schema: type) -> None:
    try:
        store.store(group=group, name=name, node=schema)
    except Exception as error:
        raise ConfigError(
            f"{group}={name}: the fields of {schema.__name__} can't be options: {str(error).splitlines()[0]}. Use int, "
            "float, bool, str, an Enum, a list or a dict of these, a dataclass, or one of them with `| None`."
        ) from error


# ---- checking arguments ------------------------------------------------------------------------------


def _checked(manager: PluginManager, word: str, words: Sequence[str], kind: type[Config]) -> str:
    """Return one of the arguments ``words`` in Hydra's syntax. Raise `ConfigError` for an unknown option or choice."""
    if word.startswith("-"):
        bare = word.lstrip("-")
        hint = f" Options are written without dashes: {bare}" if "=" in bare else " Options are written key=value."
        raise ConfigError(f"{word}: there is no such flag.{hint}")
    key, equals, value = word.partition("=")
    key = key.lstrip("+")
    if word.startswith("~"):
        raise ConfigError(f"{word}: options can't be removed. Set the one you mean, as in key=value.")
    if not equals:
        hint = next((f" Did you mean {group}={word}?" for group in GROUPS if manager.find(group, word)), "")
        hint = hint or (f" To load a plugin: plugins={word}" if word.endswith(".py") else "")
        raise ConfigError(f"{word}: write key=value.{hint}")
    if key in PRESETS or key in GROUPS:
        return _choice(manager, key, value)
    if key in RENAMED_OPTIONS:
        new = RENAMED_OPTIONS[key]
        raise ConfigError(f"{key} was renamed to {new} in minisgl {RENAMED_SINCE}. Write {new}={value}.")
    core = {option.key: option for option in core_options(kind)}
    if key in core:
        return f"{key}={_literal(core[key], value)}"
    head = key.partition(".")[0]
    if head in GROUPS and "." in key:  # Hydra checks this option, once all choices are known
        chosen = manager.schema(head, choice_of(head, words))
        named = [option for option in options_of(chosen, f"{head}.") if option.key == key]
        return f"{key}={_literal(named[0], value) if named else value}"
    _unknown(manager, key, [*core, *GROUPS, *PRESETS, *group_options(manager)])


def _choice(manager: PluginManager, group: str, value: str) -> str:
    name = value.strip("'\"")
    if group in PRESETS:
        if name not in presets(group) and name != "null":
            known = ", ".join(presets(group))
            raise ConfigError(f"{group}={value}: there is no such {group}{near(name, presets(group))} Known: {known}.")
    else:
        manager.schema(group, name)
    return f"{group}='{name}'" if name != "null" else f"{group}=null"


def _literal(option: Option, value: str) -> str:
    """Return an option's value in Hydra's syntax.

    The value of a text option is quoted, so a user can write a path with blanks, brackets or ``=`` without quotes.
    """
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    if not option.is_text or quoted or "${" in value or (option.optional and value == "null"):
        return value
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def _unknown(manager: PluginManager, key: str, known: Sequence[str]) -> NoReturn:
    tails = [k for k in known if k.rpartition(".")[2] == key]
    section = key.partition(".")[0]
    sections = {k.partition(".")[0] for k in known if "." in k} - {*GROUPS}
    if section in sections and (key == section or not tails):
        known = [k for k in known if k.startswith(f"{section}.")]
        guess = _near_in(key, known) + f" It has: {', '.join(known)}."
    else:
        guess = f". Did you mean {' or '.join(tails[:3])}?" if tails else near(key, known)
    raise ConfigError(f"There is no option {key!r}{guess} See: python -m minisgl --help")


# ---- Hydra's errors ---------------------------------------------------------------------------------


def _explain(error: Exception, manager: PluginManager, overrides: Sequence[str]) -> NoReturn:
    """Raise a `ConfigError` that explains an error of Hydra or OmegaConf, and names the argument that caused it."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import (
        ConfigAttributeError,
        ConfigKeyError,
        InterpolationResolutionError,
        MissingMandatoryValue,
        OmegaConfBaseException,
        ValidationError,
    )

    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if not isinstance(cause, OmegaConfBaseException):
        line = _first_line(error)
        if line.startswith("Ambiguous value"):
            word = line.rpartition(" ")[2].strip("'")
            line = f"{word}: give one value. A list is written in brackets: '{word.replace('=', '=[', 1)}]'"
        elif isinstance(error, OverrideParseException):
            line = (
                f'{error.override}: this can\'t be read: {line}. Quote the value: "{_quoted_example(error.override)}"'
            )
        raise ConfigError(f"{line}.") from error
    key, schema = str(cause.full_key or ""), cause.object_type
    word = next((w.lstrip("+") for w in overrides if w.lstrip("+").partition("=")[0] == key), key)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(schema, type) and is_dataclass(schema):
        _unknown_in(manager, key, schema)
    if isinstance(cause, MissingMandatoryValue):
        raise ConfigError(f"{key} has no default. Set it: {key}=…") from error
    if isinstance(cause, ValidationError):
        raise ConfigError(f"{word}: {key} must be {_expected(schema, key) or _first_line(cause)}.") from error
    if isinstance(cause, InterpolationResolutionError):
        raise ConfigError(f"{word}: {_first_line(cause)}.") from error
    raise ConfigError(f"{word}: {_first_line(cause)}" if word else _first_line(cause)) from error


def _near_in(key: str, own: Sequence[str]) -> str:
    """Return a suggestion like `near` does, for keys that differ only in the part after the last dot."""
    prefix, dot, last = key.rpartition(".")
    return near(last, [k.rpartition(".")[2] for k in own]).replace("mean ", f"mean {prefix}{dot}")


def _unknown_in(manager: PluginManager, key: str, schema: type) -> NoReturn:
    group, _, _ = key.partition(".")
    manager.load_all(group)
    own = [option.key for option in options_of(schema, key.rpartition(".")[0] + ".")]
    others = [
        f"{group}={name}"
        for name, other in manager.configs.get(group, {}).items()
        if key in [option.key for option in options_of(other, f"{group}.")]
    ]
    chosen = next((name for name, other in manager.configs.get(group, {}).items() if other is schema), schema.__name__)
    if others:
        hint = f". It is an option of {' and '.join(others)}; did you mean to choose that?"
    else:
        hint = _near_in(key, own) + (f" It has: {', '.join(own)}." if own else " It has no options.")
    raise ConfigError(f"There is no option {key!r} in {group}={chosen}{hint}")


def _expected(schema: Any, key: str) -> str:
    """Return a description of the values that a field accepts, such as "a whole number". Empty if it is not known."""
    if not (isinstance(schema, type) and is_dataclass(schema)):
        return ""
    name = key.rpartition(".")[2]
    if name not in [f.name for f in fields(schema)]:
        return ""
    hint = typing.get_type_hints(schema)[name]
    kinds = [k for k in (typing.get_args(hint) or (hint,)) if k is not type(None)]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        expected = "one of " + ", ".join(kinds[0].__members__)
    elif len(kinds) == 1 and kinds[0] in words and typing.get_origin(hint) not in (list, dict):
        expected = words[kinds[0]]
    else:
        return f"of type {hint}".replace("typing.", "")
    return expected + (" or null" if type(None) in typing.get_args(hint) else "")


def _quoted_example(word: str) -> str:
    key, _, value = word.partition("=")
    return f"{key}='{value}'"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")


# ---- the command line --------------------------------------------------------------------------------


@contextlib.contextmanager
def plain_errors(program: str = PROGRAM) -> Iterator[None]:
    """Print a `ConfigError` raised inside the context without a traceback, and exit with status 2.

    The same holds for an exception of a plugin's code that would end the program silently, such as SystemExit.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError):
            print(f"{program}: {error}", file=sys.stderr)
        elif ends_silently(error) and is_from_plugin(error):
            print(f"{program}: {described(error)}", file=sys.stderr)
        else:
            raise
        raise SystemExit(2) from None


@typing.overload
def run_cli(argv: Sequence[str]) -> tuple[Config, PluginManager]: ...


@typing.overload
def run_cli(argv: Sequence[str], kind: type[C], program: str, usage: str) -> tuple[C, PluginManager]: ...


def run_cli(
    argv: Sequence[str], kind: type[Config] = Config, program: str = PROGRAM, usage: str = ""
) -> tuple[Config, PluginManager]:
    """Return the config that a command line describes, and the plugin manager with the plugins that it names.

    ``kind`` is that of `compose`, ``program`` the name that errors begin with, ``usage`` the beginning of ``--help``.

    For one of the `FLAGS`, run the program for it and exit with status 0. Exit with status 2 if an argument is wrong.
    The plugins are loaded with ``light=True``, so torch is not imported.
    """
    words = list(argv)
    with plain_errors(program):
        for flag, name in FLAGS.items():
            if flag in words and (flag != "--complete" or words[0] == flag):
                _command(flag, name).run(words, kind, usage)
                raise SystemExit(0)
        if "--version" in words:
            print(f"minisgl {__version__}")
            raise SystemExit(0)
        manager = PluginManager.load(split_plugins(words)[0], light=True)
        if kind is Config:
            _refuse_router(words)
        return compose(manager, words, kind), manager


def _command(flag: str, name: str) -> Any:
    """Return the module for a flag of the command line. Raise `ConfigError` if its file was deleted."""
    module = f"{BUILT_IN}.command.{name}"
    if not exists(module):
        raise ConfigError(f"{flag} needs the file plugins/command/{name}.py, which is missing.")
    return import_module(module, flag)


def _refuse_router(words: Sequence[str]) -> None:
    """Raise `ConfigError` for an option of a router: a server has none."""
    for word in words:
        if word.partition("=")[0].partition(".")[0].lstrip("+") in ROUTER_GROUPS:
            raise ConfigError(f"{word}: a server has no router. It is an option of python -m minisgl.cluster.")
