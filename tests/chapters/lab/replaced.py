"""Plugins that are a reference with other lines."""

from __future__ import annotations


def replaced(base: str, pairs: list[tuple[str, str]]) -> str:
    """Return ``base`` with each first text, which must stand there, replaced by the second."""
    for old, new in pairs:
        assert old in base, old
        base = base.replace(old, new)
    return base
