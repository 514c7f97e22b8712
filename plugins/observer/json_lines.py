"""`log_format=json`: one JSON object for each line of the log."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from minisgl.utils.log import NamedFormatter

__all__ = ["JsonFormatter"]


class JsonFormatter(NamedFormatter):
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
