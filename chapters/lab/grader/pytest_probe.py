"""A pytest plugin that records which tests passed and failed, and how many of them belong to a public kit.

``python -m pytest -p minisgl.chapters.lab.grader.pytest_probe`` writes the record as JSON to the file that the
environment variable ``MINISGL_PROBE`` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_kits: dict[str, str] = {}
_seen: dict[str, Any] = {"passed": [], "failed": [], "kits": {}}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Record which tests are inherited from a kit: defined in `minisgl.testing` and not overridden."""
    for item in items:
        function: Any = getattr(item, "function", None)
        if getattr(function, "__module__", "").startswith("minisgl.testing."):
            _kits[item.nodeid] = function.__qualname__.partition(".")[0]


def pytest_runtest_logreport(report: Any) -> None:
    """Record the result of one phase of one test."""
    if report.failed:
        said = str(report.longrepr).strip().splitlines()
        raised = [line for line in said if line.startswith("E ")] or said[-1:]
        # After a failed `assert`, pytest explains the values, and says how to see more.
        asserted = [line for line in raised if "Error" in line or line.startswith("E       assert ")]
        _seen["failed"].append([report.nodeid, (asserted or raised)[-1]])
    elif report.when == "call" and report.passed:
        _seen["passed"].append(report.nodeid)
        if report.nodeid in _kits:
            kit = _kits[report.nodeid]
            _seen["kits"][kit] = _seen["kits"].get(kit, 0) + 1


def pytest_collectreport(report: Any) -> None:
    """Record a test file that can't be imported."""
    if report.failed:
        said = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        _seen["failed"].append([report.nodeid, said[-1] if said else str(report.longrepr)[-200:]])


def pytest_sessionfinish() -> None:
    """Write the record to the file."""
    Path(os.environ["MINISGL_PROBE"]).write_text(json.dumps(_seen))
