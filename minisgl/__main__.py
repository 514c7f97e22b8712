"""``python -m minisgl``: runs the server. Its arguments are options, ``key=value``; ``--help`` lists all options."""

from __future__ import annotations

from minisgl.server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
