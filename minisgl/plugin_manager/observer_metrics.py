"""The metrics of the observers: one bad observer costs neither the server nor the metrics of the others."""

from __future__ import annotations

import logging
import re
from typing import Any

import pluggy

from minisgl.plugin_manager.failures import described, ends_silently

__all__ = ["ObserverMetrics"]

log = logging.getLogger(__name__)

MOST_BYTES = 2**20
"""The longest text of one observer. Longer ones would delay the scheduler, which sends it."""
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*"(?:[^"\\\n]|\\[\\"n])*"'
_LABELS = rf"\{{[ \t]*(?:{_LABEL}[ \t]*(?:,[ \t]*{_LABEL}[ \t]*)*,?[ \t]*)?\}}"
_NUMBER = r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[Ii][Nn][Ff](?:inity)?|[Nn][Aa][Nn])"
_LINE = re.compile(
    rf"[ \t]*(?:#[ \t]*TYPE[ \t]+{_NAME}[ \t]+(?:counter|gauge|histogram|summary|untyped)[ \t]*"
    rf"|#[ \t]*HELP[ \t]+{_NAME}(?:[ \t].*)?"
    r"|#(?![ \t]*(?:TYPE|HELP)[ \t]).*"
    rf"|{_NAME}(?:[ \t]*{_LABELS}[ \t]*|[ \t]+){_NUMBER}(?:[ \t]+-?\d+)?[ \t]*"
    r"|)"
)
"""A line of Prometheus' text format: a sample, a TYPE, a HELP, another comment, or nothing."""


class ObserverMetrics:
    """Calls the hooks `minisgl_metrics` of a plugin manager's plugins, one by one.

    The metrics of an observer whose hook raises, or returns a text that Prometheus could not read, are left out. The
    first error of each observer is logged.
    """

    def __init__(self, manager: pluggy.PluginManager):
        self._manager = manager
        self._logged: set[int] = set()

    def texts(self) -> list[str]:
        """Return the metrics of all observers that have some, each as lines in Prometheus' text format."""
        found = []
        for implementation in self._manager.hook.minisgl_metrics.get_hookimpls():
            observer = implementation.plugin
            others = [plugin for plugin in self._manager.get_plugins() if plugin is not observer]
            try:
                texts = self._manager.subset_hook_caller("minisgl_metrics", others)()
                found += [_checked(text) for text in texts if text is not None]
            except BaseException as error:
                if not isinstance(error, Exception) and not ends_silently(error):
                    raise
                if id(observer) not in self._logged:
                    self._logged.add(id(observer))
                    log.error("minisgl_metrics of %s failed, so /metrics leaves its metrics out: %s",
                              implementation.plugin_name, described(error))  # fmt: skip
        return found


def _checked(text: Any) -> str:
    """Return a text of metrics with a newline at its end. Raise ValueError if it is not such a text."""
    if not isinstance(text, str):
        raise TypeError(f"it returned {type(text).__name__}, and not a str")
    if len(text) > MOST_BYTES or len(text.encode()) > MOST_BYTES:  # encode raises UnicodeEncodeError, a ValueError
        raise ValueError(f"it returned more than {MOST_BYTES} bytes")
    for number, line in enumerate(text.split("\n"), 1):
        if not _LINE.fullmatch(line):
            raise ValueError(f"line {number} is not in Prometheus' text format: {line[:200]!r}")
    return text if text.endswith("\n") or not text else text + "\n"
