"""Text that comes from a student, made safe for a report: no character moves the cursor or begins a new line.

Names of folders, messages of exceptions, `repr`s and workloads come from students. In a terminal, a control character
in them could overwrite the lines of the grader, and a newline could add one.
"""

from __future__ import annotations

from typing import Any

__all__ = ["name", "one_line", "printable", "several_lines", "values"]

_SEPARATORS = frozenset(':,;"')


def printable(text: str) -> str:
    """Return the text with an escape sequence, such as ``\\x1b``, for each character that has no printed form.

    These are control characters, newlines, invisible and bidirectional format characters, and lone surrogates, which
    are the bytes of a file name that is not UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(each: str) -> str:
    if 0xDC80 <= ord(each) <= 0xDCFF:  # a byte that Python could not decode
        return f"\\x{ord(each) - 0xDC00:02x}"
    return each.encode("unicode_escape", "surrogatepass").decode("ascii")


def one_line(text: str) -> str:
    """Return the text as one line: newlines and other white space become single spaces."""
    return printable(" ".join(text.split()))


def several_lines(text: str) -> str:
    """Return the text with its newlines, and with all other control characters escaped."""
    return "\n".join(printable(line.expandtabs()) for line in text.replace("\r\n", "\n").split("\n"))


def name(text: str) -> str:
    """Return a file name as one line. It is in quotes if it has a character that separates fields of the report."""
    shown = printable(text)
    if _SEPARATORS & set(shown) or shown != " ".join(shown.split()):
        return '"' + shown.replace('"', '\\"') + '"'
    return shown


def values(value: Any) -> Any:
    """Return plain data, such as a workload, with all texts escaped by `several_lines`."""
    if isinstance(value, str):
        return several_lines(value)
    if isinstance(value, list | tuple):
        return [values(each) for each in value]
    if isinstance(value, dict):
        return {several_lines(str(key)): values(each) for key, each in value.items()}
    return value
