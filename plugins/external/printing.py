"""``MINISGL_TRACE_HOOKS=1``: prints each hook call, with its arguments and its result, on standard error."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

__all__ = ["print_build", "print_hooks"]


def print_hooks(manager: pluggy.PluginManager) -> None:
    """Print the hook calls of a plugin manager from now on."""
    manager.add_hookcall_monitoring(_print_call, _print_result)


def print_build(label: str, made: object) -> None:
    """Print that a part was built: ``label`` is ``group=name``."""
    print(f"build [{os.getpid()}] {label} -> {reprlib.repr(made)}", file=sys.stderr, flush=True)


def _print_call(hook_name: str, hook_impls: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]) -> None:
    arguments = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in kwargs.items())
    plugins = ", ".join(impl.plugin_name for impl in reversed(hook_impls)) or "no plugin"
    print(f"hook [{os.getpid()}] {hook_name}({arguments}) calls {plugins}", file=sys.stderr, flush=True)


def _print_result(
    outcome: pluggy.Result[Any], hook_name: str, hook_impls: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]
) -> None:
    result = outcome.exception or outcome.get_result()
    print(f"hook [{os.getpid()}] {hook_name} -> {reprlib.repr(result)}", file=sys.stderr, flush=True)
