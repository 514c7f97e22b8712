"""``python -m minisgl.cluster replicas=N …``: runs several servers and a router. ``--help`` lists all options."""

from __future__ import annotations

from minisgl.cluster.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
