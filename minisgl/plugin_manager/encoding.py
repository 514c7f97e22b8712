"""A config as bytes, which a worker process decodes; and what such a process must do before it imports torch.

The plugins of a worker process are not loaded yet when it decodes a part of its config, because they import torch. So
an options dataclass may name a function, in a class attribute ``early_context`` such as ``"my_module.start"``, that
starts something before that, such as processes that import torch themselves: `started_early`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from typing import Any

import msgspec

from minisgl.config import GROUPS, SECTIONS, Config
from minisgl.plugin_manager.manager import PluginManager

__all__ = [
    "decode_config",
    "decode_part",
    "early_functions",
    "early_of",
    "encode_config",
    "options_of",
    "plugins_of",
    "started_early",
]


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
    default = Config()
    for name in SECTIONS:
        plain[name] = msgspec.convert(plain[name], type(getattr(default, name)))
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


def early_functions(*parts: Any) -> list[str]:
    """Return the functions that the options of some groups name: each as ``module.function``."""
    return [part.early_context for part in parts if hasattr(part, "early_context")]


@contextmanager
def started_early(functions: Sequence[str], device: str, tp: int) -> Iterator[None]:
    """Enter the context that each function returns, called as ``function(device, tp)``, while the body runs.

    ``device`` and ``tp`` are the options of these names. The body builds the engine. It may enter the same contexts.
    """
    with ExitStack() as stack:
        for name in functions:
            module, _, function = name.rpartition(".")
            stack.enter_context(getattr(importlib.import_module(module), function)(device, tp))
        yield
