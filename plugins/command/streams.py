"""Standard streams that are closed when a program starts."""

from __future__ import annotations

import os


def open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed, so that no socket gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(opened, True)
