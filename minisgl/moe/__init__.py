"""`MoeBackend` was here until 0.3: it is in `minisgl.plugins.moe` now."""

from __future__ import annotations

from typing import Any

from minisgl.plugin_manager.discovery import moved


def __getattr__(name: str) -> Any:
    return moved(__name__, name)
