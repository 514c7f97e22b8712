"""Private gates: an instructor's Python file with more gates for some labs. Students do not get it.

The file has a dict ``GATES``: the name of a lab → a sequence of `minisgl.chapters.lab.grader.gate.Gate`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import find
from minisgl.chapters.lab.grader.gate import Gate
from minisgl.config import ConfigError

__all__ = ["private_gates"]


def private_gates(path: Path) -> dict[str, list[Gate]]:
    """Import the file and return its gates by lab. Raise `ConfigError` if it is not such a file."""
    spec = importlib.util.spec_from_file_location(
        f"minisgl_private_gates_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}", path
    )
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--gates {path}: there is no such Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--gates {path}: the file can't be imported: {type(error).__name__}: {error}") from error
    return _checked(path, getattr(module, "GATES", None))


def _checked(path: Path, found: Any) -> dict[str, list[Gate]]:
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"--gates {path}: the file must define GATES, a dict from a lab's name to its gates.")
    gates: dict[str, list[Gate]] = {}
    for name, given in found.items():
        known = {gate.name for gate in find(name).gates} | {"loads"}
        if not isinstance(given, Sequence) or not all(isinstance(gate, Gate) for gate in given):
            raise ConfigError(f"--gates {path}: GATES[{name!r}] must be a list of gates.")
        for gate in given:
            if gate.name in known:
                raise ConfigError(f"--gates {path}: lab {name} has a gate {gate.name!r} already. Give it another name.")
            if gate.served:
                raise ConfigError(f"--gates {path}: the gate {gate.name!r} has served=True, which private gates can't.")
            known.add(gate.name)
        gates[name] = list(given)
    return gates
