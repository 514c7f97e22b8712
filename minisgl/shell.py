"""``python -m minisgl.shell``: a chat in the terminal, see ``plugins/command/shell.py``."""

from __future__ import annotations

from importlib import import_module

if __name__ == "__main__":
    raise SystemExit(import_module("minisgl.plugins.command.shell").main())
