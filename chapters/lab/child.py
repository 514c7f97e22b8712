"""Runs a module of the course in a child process, with JSON in and JSON out: the code of a student runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["ChildError", "ask_child"]


class ChildError(Exception):
    """A child process gave no answer. The text says why: the last line of its standard error, or that it took long."""


def ask_child(module: str, request: Any, seconds: float, env: Mapping[str, str] | None = None) -> Any:
    """Run ``python -m module`` with ``request`` as JSON on its standard input, and return its last line, read as JSON.

    ``env`` is added to the environment. Raise `ChildError` if the child fails, or is not done after ``seconds``.
    """
    command, environment = [sys.executable, "-m", module], {**os.environ, **(env or {})}
    given = json.dumps(request)
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"it was not done after {seconds:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise ChildError((done.stderr.strip().splitlines() or ["its process has ended"])[-1])
    return json.loads(lines[-1])
