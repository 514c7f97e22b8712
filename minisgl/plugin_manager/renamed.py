"""The names that 0.2.0 and 0.3.0 retired, and the names that replaced them: for error messages."""

from __future__ import annotations

import logging
from importlib import import_module
from types import MappingProxyType
from typing import Any

RENAMED_SINCE = "0.2.0"
UPGRADE_PAGE = "docs/upgrade-0.2.md"

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
        "attention": (("attend", "norm_rope_store"), "minisgl.attention", "AttentionBackend"),
        "graph": (("wrap", "wrap_attention"), "minisgl.plugins.graph.replaying", "BucketRunner"),
        "speculation": (("speculate",), "minisgl.plugins.speculation", "DraftProposer"),
    }
)
"""Group → methods that its parts have since 0.3, and the class from which a part for 0.2 gets them."""

ADDED_ARGUMENTS = MappingProxyType({"attention": {"attend": ("layer", "qkv", "norm", "cos_sin", "out_cache_loc")}})
"""Group → method that its parts have since 0.3 → its arguments. A part for 0.2 may use the name for something else."""

MOVED = MappingProxyType(
    {
        "DraftProposer": "minisgl.plugins.speculation",
        "MoELayer": "minisgl.plugins.models.experts",
        "MoeBackend": "minisgl.plugins.moe",
    }
)
"""Public names that moved in 0.3 → the module that has them now. They still work at their old place, with a warning."""


def moved(module: str, name: str) -> Any:
    """Return what ``name``, which ``module`` does not have any more, is now. Log a warning that says where it is.

    Raise AttributeError if ``name`` has not moved. A module calls this function in its ``__getattr__``.
    """
    if name not in MOVED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    logging.getLogger(__name__).warning(
        "%s.%s has moved: write `from %s import %s` (docs/upgrade-0.3.md)", module, name, MOVED[name], name
    )
    return getattr(import_module(MOVED[name]), name)


RENAMED_OPTIONS = MappingProxyType({"load": "load_format", "server.log_level": "log_level"})
"""Options of the command line: old name → new name."""

RENAMED_HOOK_ARGUMENTS = MappingProxyType({"minisgl_pages_cached": MappingProxyType({"held": "cached_pages"})})
"""Hook → old name of an argument → new name."""
