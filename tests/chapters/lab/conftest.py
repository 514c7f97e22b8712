"""Keep pytest from collecting the cheats and the seeded solutions, some of which are packages with their own tests."""

from __future__ import annotations

collect_ignore_glob = ["solutions/*", "cheats/*"]
