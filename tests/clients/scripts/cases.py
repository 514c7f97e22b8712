"""The part that the scripts of Python clients share. A script runs in the environment of its client, not in minisgl's.

A script defines a function for each case and calls `run`, which writes what the functions returned to a file. The
environment variable ``MINISGL_URL`` has the address of the server.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

__all__ = [
    "ADD", "CALCULATOR", "KEY", "MODEL", "QUESTION", "RESULT", "TO_CALCULATE", "URL", "USER", "Person", "add", "called",
    "case", "run",
]  # fmt: skip

URL = os.environ["MINISGL_URL"] + "/v1"
MODEL, KEY = "tutor", "none"
QUESTION = "What is a KV cache?"
USER: list[Any] = [{"role": "user", "content": QUESTION}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
            "required": ["a", "b"],
        },
    },
}
"""A tool with bounded arguments, so that every call ends soon."""
TO_CALCULATE = "What is 37 * 48?"
RESULT = "1776"
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
"""The tool that ``tutor`` calls by itself, a question for it, and what it returns then."""
_CASES: dict[str, Callable[[], Any]] = {}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=9)


def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def called(name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as a case reports it."""
    return {"name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a case: the function's name is the case's, and it returns a value that JSON can have."""
    _CASES[function.__name__] = function
    return function


def run() -> None:
    """Run all cases, or those that the command line names after the file, and write the results to the file.

    A result has the entry ``value``, or ``error`` with the traceback.
    """
    file, *names = sys.argv[1:]
    results: dict[str, Any] = {}
    for name in names or _CASES:
        try:
            value = _CASES[name]()
            results[name] = {"value": asyncio.run(value) if inspect.iscoroutine(value) else value}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    Path(file).write_text(json.dumps(results))
