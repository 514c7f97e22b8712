"""``python -m minisgl.demo``: serves ``tutor`` and asks it three questions, see ``plugins/command/demo.py``."""

from __future__ import annotations

from importlib import import_module

if __name__ == "__main__":
    raise SystemExit(import_module("minisgl.plugins.command.demo").main())
