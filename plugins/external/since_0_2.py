"""Plugins for minisgl 0.2: their hooks that build parts, and the methods that their parts lack.

Such plugins still work, with a warning that says what to write now.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pluggy

from minisgl.config import ConfigError
from minisgl.plugin_manager.discovery import import_module
from minisgl.plugins.external.parts import PARTS

log = logging.getLogger(__name__)

FACTORY_HOOKS = MappingProxyType(
    {
        f"minisgl_{'proposer' if group == 'speculation' else group}": group
        for group in ("attention", "cache", "scheduler", "moe", "fp8_gemm", "graph", "communicator", "speculation",
                      "routing", "router")
    }
)  # fmt: skip
"""Hooks that built the parts of an engine in 0.2 → the group. Since 0.3, the options dataclass has a method ``build``.
Plugins with these hooks still work, with a warning."""

ADDED_METHODS = MappingProxyType(
    {
        "attention": (("attend", "norm_rope_store", "group_layers"), "minisgl.attention", "AttentionBackend"),
        "graph": (("wrap", "wrap_attention", "warm_up"), "minisgl.plugins.graph.replaying", "BucketRunner"),
        "speculation": (("speculate",), "minisgl.plugins.speculation", "DraftProposer"),
    }
)
"""Group → methods that its parts have since 0.3, and the class from which a part for 0.2 gets them."""

ADDED_ARGUMENTS = MappingProxyType({"attention": {"attend": ("layer", "qkv", "norm", "cos_sin", "out_cache_loc")}})
"""Group → method that its parts have since 0.3 → its arguments. A part for 0.2 may use the name for something else."""


def warn_of_factory_hook(hook: str, label: str) -> None:
    """Log what a plugin for 0.2 writes now instead of a hook that builds a part."""
    log.warning(
        "%s: the hook %s is deprecated and will be removed: write its body as the method `build` of the options"
        " dataclass, which takes %s by name (docs/upgrade-0.3.md)",
        label,
        hook,
        ", ".join([*PARTS[FACTORY_HOOKS[hook]].arguments, "build_other"]),
    )


def build_with_hook(relay: pluggy.HookRelay, group: str, config: Any, given: Mapping[str, Any], owner: str) -> Any:
    """Call the hook with which a plugin for minisgl 0.2 builds its part. Raise `ConfigError` if it has none.

    ``owner`` is the plugin that registered the dataclass of ``config``.
    """
    hook = next((hook for hook, built in FACTORY_HOOKS.items() if built == group), "")
    caller = getattr(relay, hook, None)
    made: list[Any] = [] if caller is None else caller(config=config, build=given["build_other"], **given)
    if not made:
        raise ConfigError(
            f"The dataclass {type(config).__name__} (registered by {owner}) has no method `build`. Add `def "
            "build(self): return …`, which returns the part."
        )
    return made[0]


def add_methods(group: str, label: str, made: Any) -> None:
    """Give a part of a plugin for minisgl 0.2 the methods that such parts have since 0.3, and log a warning.

    Raise `ConfigError` if it can't get the methods.
    """
    methods, module, base = ADDED_METHODS.get(group, ((), "", ""))
    kind: type = type(made)
    for method, arguments in ADDED_ARGUMENTS.get(group, {}).items():
        own = list(inspect.signature(getattr(made, method)).parameters) if hasattr(made, method) else arguments
        if len(own) != len(arguments):
            raise ConfigError(
                f"minisgl calls {kind.__name__}.{method}({', '.join(arguments)}) since 0.3, but yours "
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
        raise ConfigError(f"{kind.__name__} has no method {missing[0]}: {advice}.") from error
    log.warning("%s: %s has no method %s; %s (docs/upgrade-0.3.md)", label, kind.__name__, missing[0], advice)
