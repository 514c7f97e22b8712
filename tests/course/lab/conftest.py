"""Seeded solutions are graded, not collected: some are packages with tests of their own."""

from __future__ import annotations

collect_ignore_glob = ["solutions/*"]
