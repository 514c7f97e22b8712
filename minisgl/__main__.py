"""``python -m minisgl``: serve. The words after it are options, ``key=value``; ``--help`` lists them all."""

from __future__ import annotations

from minisgl.server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
