"""Sets up Python's logging in a process of minisgl: one handler on standard error, as text or as JSON lines.

Programs call `setup_logging` once. The library itself only asks for loggers (``logging.getLogger(__name__)``). A
program that uses ``LLM`` configures logging itself.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime

from minisgl.config import ConfigError
from minisgl.plugin_manager.discovery import exists, import_module

__all__ = ["setup_logging"]

JSON_LINES = "minisgl.plugins.observer.json_lines"
"""The plugin that formats the lines of ``log_format=json``."""


def is_logged(times: int) -> bool:
    """Return whether to log an event that a client can cause at will, at its 1st, 2nd, 4th, 8th, … time."""
    return times & (times - 1) == 0


class NamedFormatter(logging.Formatter):
    """A formatter that knows the process: ``name`` is its role, such as ``api`` or ``scheduler-0``."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class TextFormatter(NamedFormatter):
    """``2026-11-22 11:05:01.123 INFO scheduler minisgl.engine.engine: message name=value``.

    The names and values are the fields of a record that was logged with ``extra={"fields": {…}}``, without those in
    ``extra={"said": …}``, which the message contains.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the traceback if there is one."""
        when = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        text = f"{when} {record.levelname} {self.name} {record.name}: {record.getMessage()}"
        said = getattr(record, "said", ())
        for name, value in getattr(record, "fields", {}).items():
            if name in said:
                continue
            text += f" {name}={value if isinstance(value, int | float) else repr(value)}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def setup_logging(level: str, style: str, process: str) -> None:
    """Send the log of this process to standard error.

    ``level`` and ``style`` are the options ``log_level`` and ``log_format``; each line names ``process``.
    minisgl and its HTTP server log at ``level``; other libraries log warnings and errors only. A call replaces all
    handlers of the root logger. Raise `ConfigError` for JSON lines without `JSON_LINES`.
    """
    if style == "json" and not exists(JSON_LINES):
        raise ConfigError("log_format=json needs the plugin plugins/observer/json_lines, which is missing.")
    formats = import_module(JSON_LINES, "log_format=json").JsonFormatter if style == "json" else TextFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formats(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.WARNING))
    for name in ("minisgl", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)
