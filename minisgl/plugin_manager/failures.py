"""Errors as text. ``plugins/external`` adds which plugin raised an error, once it is loaded."""

from __future__ import annotations

import sys
from typing import Any


def described(error: BaseException) -> str:
    """Return the type and text of an exception and, if code of a plugin raised it, the plugin, function and line."""
    external = _external()
    text: str = named(error) if external is None else external.described(error)
    return text


def silent(error: BaseException) -> str:
    """Return the text of an exception of a plugin that would end the process without a traceback; of others, none."""
    external = _external()
    return external.described(error) if external is not None and external.is_silent(error) else ""


def named(error: BaseException) -> str:
    """Return the type of an exception and its text, if it has one that can be printed."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _external() -> Any:
    """Return the module that knows plugins that are not built in, or None: there is no such plugin."""
    return sys.modules.get("minisgl.plugins.external.failures")
