"""Which command installs a package that a plugin needs."""

from __future__ import annotations

import importlib.metadata
import re


def missing_package(error: ImportError) -> str:
    """Return an error message that names the missing package and the command that installs it.

    The command installs one of minisgl's extras if that extra includes the package.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"{error}. Check the spelling, and that the package's version has it."
    package = error.name.partition(".")[0]
    if "relative import" in str(error) or not package:
        return f"{error}. A plugin file is not part of a package: use absolute imports."
    command = f"pip install {package.replace('_', '-')}"
    wanted = re.sub(r"[-_.]+", "-", package).lower()
    try:
        requirements = importlib.metadata.requires("minisgl") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        brought = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
        if extra and (brought == wanted or brought.startswith(wanted + "-")):
            command = f"pip install 'minisgl[{extra[1]}]'"
            break
    return f"it needs the package {package!r}, which is not installed. Try: {command}"
