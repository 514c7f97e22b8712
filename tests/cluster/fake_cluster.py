"""``python -m minisgl.cluster`` whose servers are those of `fake_server.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from minisgl.cluster import cli, cluster

if __name__ == "__main__":
    cluster.SERVER = (sys.executable, "-S", str(Path(__file__).parent / "fake_server.py"))
    raise SystemExit(cli.main())
