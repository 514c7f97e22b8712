"""Checks that the metrics of an observer are text that Prometheus can read: one bad line would spoil all of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

__all__ = ["checking_metrics"]

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


def checking_metrics(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an implementation of `minisgl_metrics` that raises an exception for a text that Prometheus can't read."""

    @functools.wraps(function)
    def metrics(*args: Any, **kwargs: Any) -> str | None:
        text = function(*args, **kwargs)
        if text is None:
            return None
        if not isinstance(text, str):
            raise TypeError(f"it returned {type(text).__name__}, and not a str")
        if len(text) > MOST_BYTES or len(text.encode()) > MOST_BYTES:  # encode raises UnicodeEncodeError, a ValueError
            raise ValueError(f"it returned more than {MOST_BYTES} bytes")
        for number, line in enumerate(text.split("\n"), 1):
            if not _LINE.fullmatch(line):
                raise ValueError(f"line {number} is not in Prometheus' text format: {line[:200]!r}")
        return text

    return metrics
