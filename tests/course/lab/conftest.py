"""Keep pytest from collecting the seeded solutions: some of them are packages with tests of their own."""

from __future__ import annotations

collect_ignore_glob = ["solutions/*"]
