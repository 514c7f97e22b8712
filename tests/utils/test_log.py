"""Logging: the lines of both formats, and which levels reach them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from minisgl.config import ConfigError
from minisgl.utils.log import setup_logging

CODE = """
import logging, sys, warnings
from minisgl.utils.log import setup_logging
setup_logging(sys.argv[1], sys.argv[2], "scheduler")
setup_logging(sys.argv[1], sys.argv[2], "scheduler")  # the second call replaces the first one's handler
log = logging.getLogger("minisgl.engine")
log.debug("pages: %d", 7)
log.info("ready")
logging.getLogger("elsewhere").info("another library")
logging.getLogger("elsewhere").warning("another library warns")
try:
    raise ValueError("a cause")
except ValueError:
    log.exception("failed")
"""


def lines(level: str, style: str) -> list[str]:
    """Run the code above and return its log, line by line."""
    command = [sys.executable, "-c", CODE, level, style]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()


def test_json_lines() -> None:
    entries = [json.loads(line) for line in lines("info", "json")]
    assert [entry["message"] for entry in entries] == ["ready", "another library warns", "failed"]
    assert [entry["level"] for entry in entries] == ["info", "warning", "error"]
    assert {entry["process"] for entry in entries} == {"scheduler"}
    assert all(entry["pid"] != os.getpid() and entry["time"].endswith("+00:00") for entry in entries)
    assert "ValueError: a cause" in entries[2]["exception"]
    assert "exception" not in entries[0]


def test_text_lines() -> None:
    text = lines("info", "text")
    assert text[0].endswith(" INFO scheduler minisgl.engine: ready")
    assert text[-1] == "ValueError: a cause"


@pytest.mark.parametrize(("level", "first"), [("debug", "pages: 7"), ("info", "ready"), ("error", "failed")])
def test_levels(level: str, first: str) -> None:
    assert json.loads(lines(level, "json")[0])["message"] == first


def test_json_lines_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handlers stay as they are."""
    monkeypatch.setattr("minisgl.utils.log.exists", lambda name: False)
    handlers = list(logging.getLogger().handlers)
    with pytest.raises(ConfigError, match="plugins/observer/json_lines, which is missing"):
        setup_logging("info", "json", "scheduler")
    assert logging.getLogger().handlers == handlers
