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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.config import GROUPS, PLAIN, ROUTER_GROUPS, Config, ConfigError
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.plugin_manager.failures import silent
from minisgl.plugin_manager.manager import BUILT_IN, PluginManager
from minisgl.utils.version import __version__

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig

C = typing.TypeVar("C", bound=Config)
PROGRAM = "minisgl"
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
        raise _explained(error, manager, overrides) from error
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
    for word in words:  # Hydra leaves out a part that it does not find, because a default part may have been deleted
        group, _, name = word.lstrip("+").partition("=")
        if group in GROUPS:
            manager.schema(group, name.strip("'\""))
    if arguments := _command("arguments"):
        words = [arguments.in_hydra_syntax(manager, word, words, kind) for word in words]
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    own = tuple(option for plugin in manager.external_plugins for option in plugin.options)
    try:
        return _compose_with_hydra(tuple(words), kind, _Loader(own, weakref.proxy(manager)))  # type: ignore[arg-type]
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _explained(error, manager, overrides) from error


def _explained(error: Exception, manager: PluginManager, overrides: Sequence[str]) -> ConfigError:
    """Return a `ConfigError` for an error of Hydra or OmegaConf, with advice if there is ``plugins/command``."""
    if advice := _command("advice"):
        return ConfigError(advice.explain(error, manager, overrides))
    return ConfigError(first_line(error))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not blank, or the name of its class."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


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


# ---- the command line --------------------------------------------------------------------------------


@contextlib.contextmanager
def plain_errors(program: str = PROGRAM) -> Iterator[None]:
    """Print a `ConfigError` raised inside the context without a traceback, and exit with status 2.

    The same holds for an exception of a plugin's code that would end the program silently, such as SystemExit.
    """
    try:
        yield
    except BaseException as error:
        text = str(error) if isinstance(error, ConfigError) else silent(error)
        if not text:
            raise
        print(f"{program}: {text}", file=sys.stderr)
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

    For a flag such as ``--help``, print what it asks for and exit with status 0. Exit with status 2 if an argument is
    wrong. The plugins are loaded with ``light=True``, so torch is not imported.
    """
    if streams := _command("streams"):
        streams.open_standard_streams()
    words = list(argv)
    with plain_errors(program):
        if "--version" in words:
            print(f"minisgl {__version__}")
            raise SystemExit(0)
        if (arguments := _command("arguments")) and arguments.run_flag(words, kind, usage):
            raise SystemExit(0)
        manager = PluginManager.load(split_plugins(words)[0], light=True)
        for word in words:
            if kind is Config and re.split(r"[.=]", word.lstrip("+"))[0] in ROUTER_GROUPS:
                raise ConfigError(f"{word}: a server has no router. It is an option of python -m minisgl.cluster.")
        return compose(manager, words, kind), manager


def _command(name: str) -> Any:
    """Return the module ``plugins/command/<name>``, or None if its file was deleted.

    ``arguments`` runs flags, and lets people write text without Hydra's quotes; ``advice`` explains errors; ``streams``
    replaces closed standard streams.
    """
    module = f"{BUILT_IN}.command.{name}"
    return import_module(module, module) if exists(module) else None
