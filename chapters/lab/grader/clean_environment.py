"""A clean virtual environment with one package installed, as a user of the package has it.

The environment sees the packages of the current environment (minisgl, torch, pytest), so nothing is downloaded. The
package is built by its own build backend from a copy of its folder, and the wheel is unpacked into the environment. The
package's folder itself is not on any import path.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
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

from minisgl.chapters.lab.grader.gate import Missing

__all__ = ["BuildFailed", "CleanEnvironment", "clean_environment", "undeclared"]

BUILD_SECONDS = 60.0
"""Seconds that the build of the package may take."""
_SKIP = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "venv")
_BUILD = "import importlib, sys; print(importlib.import_module(sys.argv[1]).build_wheel(sys.argv[2]))"


class BuildFailed(Exception):  # noqa: N818 - a finding
    """No wheel can be built from the folder. ``why`` says the reason in one line."""

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment with the package installed.

    ``python`` is its interpreter, ``site`` its folder of installed packages, ``dist`` the distribution's name, and
    ``tests`` the path of a copy of the package's tests, which exists if the package has tests.
    """

    python: Path
    site: Path
    dist: str
    tests: Path

    def run(
        self, *args: str, seconds: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python with ``args``, in a folder outside the package's.

        Raise `subprocess.TimeoutExpired` after ``seconds``.
        """
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


def clean_environment(source: Path, at: Path) -> CleanEnvironment:
    """Return the environment in the folder ``at`` with the package of the folder ``source``.

    An existing environment is reused unless the package has changed. Raise `BuildFailed` if the package can't be built,
    and `Missing` if its build backend is not installed here.
    """
    stamp, digest = at / "made.json", _digest(source)
    python = at / ("Scripts" if os.name == "nt" else "bin") / ("python.exe" if os.name == "nt" else "python")
    purelib = sysconfig.get_path("purelib", "venv", {"base": str(at), "platbase": str(at)})
    if stamp.is_file():
        known = json.loads(stamp.read_text())
        if known["digest"] == digest:
            return CleanEnvironment(python, Path(purelib), known["dist"], at / "away" / "tests")
    shutil.rmtree(at, ignore_errors=True)
    venv.EnvBuilder(symlinks=os.name != "nt", with_pip=False).create(at)
    parents = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    (Path(purelib) / "parent.pth").write_text(parents)
    away = at / "away"
    shutil.copytree(source, at / "source", ignore=_SKIP)
    away.mkdir()
    if (at / "source" / "tests").is_dir():
        shutil.copytree(at / "source" / "tests", away / "tests")
    dist = _install(at / "source", Path(purelib), at, python)
    shutil.rmtree(at / "source")
    stamp.write_text(json.dumps({"digest": digest, "dist": dist}))
    return CleanEnvironment(python, Path(purelib), dist, away / "tests")


def undeclared(env: CleanEnvironment) -> tuple[str, str] | None:
    """Return a file of the package and the distribution that it imports without declaring it; None if there is none.

    The environment sees all packages of this one, so such an import works here. An import in a function, in a `try` or
    under an `if` may be optional.
    """
    try:
        minisgl = importlib.metadata.distribution("minisgl")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed: its dependencies are unknown
        return None
    package = next(each for each in importlib.metadata.distributions(path=[str(env.site)]) if each.name == env.dist)
    files = [str(file) for file in package.files or () if file.suffix == ".py"]
    own = {file.split("/")[0].removesuffix(".py") for file in files}
    allowed: set[str] | None = None
    for file in files:
        for name in _imports((env.site / file).read_text("utf-8")) - own - sys.stdlib_module_names - {"minisgl"}:
            if allowed is None:
                allowed, owners = _with_dependencies([package, minisgl]), importlib.metadata.packages_distributions()
            dists = owners.get(name, [])
            if dists and not allowed.intersection(map(_normalized, dists)):
                return file, dists[0]
    return None


def _imports(source: str) -> set[str]:
    """Return the top-level names of the modules that a file always imports."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _normalized(dist: str) -> str:
    return re.sub(r"[-_.]+", "-", dist).lower()


def _with_dependencies(packages: list[importlib.metadata.Distribution]) -> set[str]:
    """Return the names of all distributions that pip installs with these, as far as they are known here."""
    found: set[str] = set()
    new = list(packages)
    while new:
        for line in new.pop().requires or ():
            name = _normalized(re.split(r"[^\w.-]", line.strip())[0])
            if "extra ==" in line or name in found:
                continue
            found.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                new.append(importlib.metadata.distribution(name))
    return found


def _install(source: Path, purelib: Path, at: Path, python: Path) -> str:
    """Build a wheel from ``source``, unpack it into ``purelib``, and return the distribution's name."""
    file = source / "pyproject.toml"
    if not file.is_file():
        raise BuildFailed("The folder has no pyproject.toml, so pip can't install it.")
    try:
        project = tomllib.loads(file.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise BuildFailed(f"pyproject.toml is not valid TOML: {error}") from error
    backend = project.get("build-system", {}).get("build-backend", "setuptools.build_meta")
    (at / "wheel").mkdir()
    command = [str(python), "-c", _BUILD, backend, str(at / "wheel")]
    try:
        built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"The build did not end within {BUILD_SECONDS:.0f} s.") from error
    if built.returncode:
        last = [line for line in built.stderr.splitlines() if line.strip()][-1:]
        missing = backend.partition(".")[0]
        if f"No module named '{missing}'" in built.stderr:
            raise Missing(f"the package is built by {backend}, which is not installed: pip install {missing}")
        raise BuildFailed(f"{backend} can't build the package: {''.join(last)}")
    (wheel,) = (at / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(purelib)
        metadata = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        return str(HeaderParser().parsestr(packed.read(metadata).decode())["Name"])


def _files(source: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(source):
        skipped = _SKIP(folder, [*folders, *files])
        folders[:] = sorted(set(folders) - skipped)
        yield from (Path(folder) / name for name in sorted(set(files) - skipped))


def _digest(source: Path) -> str:
    """Return a hash of every file that the build reads, of the folder's path, and of the Python version."""
    digest = hashlib.sha256(f"{sys.version} {source}".encode())
    for file in _files(source):
        digest.update(str(file.relative_to(source)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
