"""Reading of JSON files, with errors for people, and a test of JSON values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError

__all__ = ["is_neutral", "read_json", "read_json_if_present"]


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `ConfigError` if the file holds anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, it holds a {type(value).__name__}.")
    return value


def read_json_if_present(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file, or return an empty one if there is no such file. Raises as `read_json` does."""
    return read_json(file) if file.is_file() else {}


def is_neutral(value: Any) -> bool:
    """Return whether a field's value asks for nothing: null, false, or an empty string, list or object."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)
