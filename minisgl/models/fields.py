"""Typed reading of single fields of a config.json. Each function raises `ConfigError` that names a wrong field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.config import ConfigError

__all__ = ["flag", "number", "positive"]

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal models put the configuration of their language model."""


def positive(raw: Mapping[str, Any], key: str) -> int:
    """Return ``raw[key]``. Raises `ConfigError` if it is missing or is not a positive integer."""
    value = raw.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    problem = f"{key} must be a positive integer, got {value!r}"
    if value is not None:
        raise ConfigError(f"{problem}.")
    name = (raw.get("architectures") or ["model"])[0]
    nested = [other for other in _NESTED if isinstance(raw.get(other), dict)]
    if nested:
        raise ConfigError(
            f"{problem}: a {name} nests the sizes of its language model in {nested[0]}, as multimodal models do. "
            "minisgl serves text-only models: use a checkpoint of the language model alone, whose config.json has the "
            "sizes at the top level."
        )
    raise ConfigError(
        f"{problem}: the config.json of this {name} lacks the field. minisgl serves decoders whose sizes have Llama's "
        "names."
    )


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Return ``raw[key]``, or ``default`` if it is missing. Raises `ConfigError` if it is not a number."""
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key} must be a number, got {value!r}.")
    return value


def flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return ``raw[key]``, or ``default`` if it is missing. Raises `ConfigError` if it is neither true nor false."""
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, got {value!r}.")
    return value
