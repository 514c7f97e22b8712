"""A clean environment with one package in it: what somebody has who installs it and nothing else of its author's.

What this environment has (minisgl, torch, pytest) is seen from there, so nothing is fetched. The package is built by
its own build backend, from a copy, and its wheel is unpacked; its folder is not on any path.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from minisgl.course.lab.grader.gate import Missing

__all__ = ["Clean", "NotBuilt", "clean"]

BUILD_SECONDS = 60.0
_SKIP = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "venv")
_BUILD = "import importlib, sys; print(importlib.import_module(sys.argv[1]).build_wheel(sys.argv[2]))"


class NotBuilt(Exception):  # noqa: N818 - a finding
    """The folder gives no wheel. ``why`` in a line."""

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Clean:
    """``python`` sees the package in ``site`` under the name ``dist``; ``tests`` is a copy of its tests, if any."""

    python: Path
    site: Path
    dist: str
    tests: Path

    def run(
        self, *args: str, seconds: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The environment's Python with ``args``, far from the package's folder. Raises subprocess.TimeoutExpired."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return subprocess.run(
            [str(self.python), *args],
            cwd=self.tests.parent,
            env={**kept, **(env or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


def clean(source: Path, at: Path) -> Clean:
    """The environment in the folder ``at`` with the package of ``source``; made anew where that has changed.

    Raises `NotBuilt`, and `Missing` where this machine does not have what builds it.
    """
    stamp, digest = at / "made.json", _digest(source)
    python = at / ("Scripts" if os.name == "nt" else "bin") / ("python.exe" if os.name == "nt" else "python")
    places = sysconfig.get_path("purelib", "venv", {"base": str(at), "platbase": str(at)})
    if stamp.is_file():
        known = json.loads(stamp.read_text())
        if known["digest"] == digest:
            return Clean(python, Path(places), known["dist"], at / "away" / "tests")
    shutil.rmtree(at, ignore_errors=True)
    venv.EnvBuilder(symlinks=os.name != "nt", with_pip=False).create(at)
    parents = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    (Path(places) / "parent.pth").write_text(parents)
    away = at / "away"
    shutil.copytree(source, at / "source", ignore=_SKIP)
    away.mkdir()
    if (at / "source" / "tests").is_dir():
        shutil.copytree(at / "source" / "tests", away / "tests")
    made = Clean(python, Path(places), _install(at / "source", Path(places), at, python), away / "tests")
    shutil.rmtree(at / "source")
    stamp.write_text(json.dumps({"digest": digest, "dist": made.dist}))
    return made


def _install(source: Path, places: Path, at: Path, python: Path) -> str:
    """Build a wheel from ``source`` and unpack it; the name of what is now installed."""
    file = source / "pyproject.toml"
    if not file.is_file():
        raise NotBuilt("There is no pyproject.toml, so nobody can install it.")
    try:
        project = tomllib.loads(file.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise NotBuilt(f"pyproject.toml is no TOML: {error}") from error
    backend = project.get("build-system", {}).get("build-backend", "setuptools.build_meta")
    (at / "wheel").mkdir()
    command = [str(python), "-c", _BUILD, backend, str(at / "wheel")]
    try:
        built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"Its build was not done after {BUILD_SECONDS:.0f} s.") from error
    if built.returncode:
        last = [line for line in built.stderr.splitlines() if line.strip()][-1:]
        missing = backend.partition(".")[0]
        if f"No module named '{missing}'" in built.stderr:
            raise Missing(f"the package is built by {backend}, which is not installed: pip install {missing}")
        raise NotBuilt(f"{backend} can't build it: {''.join(last)}")
    (wheel,) = (at / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(places)
        metadata = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        return str(HeaderParser().parsestr(packed.read(metadata).decode())["Name"])


def _files(source: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(source):
        skipped = _SKIP(folder, [*folders, *files])
        folders[:] = sorted(set(folders) - skipped)
        yield from (Path(folder) / name for name in sorted(set(files) - skipped))


def _digest(source: Path) -> str:
    """Of every file that a build sees, of where they are, and of this Python."""
    digest = hashlib.sha256(f"{sys.version} {source}".encode())
    for file in _files(source):
        digest.update(str(file.relative_to(source)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
