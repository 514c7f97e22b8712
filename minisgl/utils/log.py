"""Sets up Python's logging in a process of minisgl: one handler on standard error, as text or as JSON lines.

Programs call `setup_logging` once. The library itself only asks for loggers (``logging.getLogger(__name__)``). A
program that uses ``LLM`` configures logging itself.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

__all__ = ["setup_logging"]


def is_logged(times: int) -> bool:
    """Return whether to log an event that a client can cause at will, at its 1st, 2nd, 4th, 8th, … time."""
    return times & (times - 1) == 0


class _Named(logging.Formatter):
    """A formatter that knows the process: ``name`` is its role, such as ``api`` or ``scheduler-0``."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class TextFormatter(_Named):
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


class JsonFormatter(_Named):
    """One JSON object a line: ``time`` (UTC, ISO 8601), ``level``, ``process``, ``pid``, ``logger``, ``message``.

    A record with an exception has ``exception`` too, the traceback as text. The fields of a record that was logged with
    ``extra={"fields": {…}}`` are added.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as one line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.name,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def setup_logging(level: str, style: str, process: str) -> None:
    """Send the log of this process to standard error.

    ``level`` and ``style`` are the options ``log_level`` and ``log_format``; each line names ``process``.
    minisgl and its HTTP server log at ``level``; other libraries log warnings and errors only. A call replaces all
    handlers of the root logger.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.WARNING))
    for name in ("minisgl", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)
