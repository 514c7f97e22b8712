"""The example package in docs/examples is built, installed and tested in a clean environment, as a student's is."""

from __future__ import annotations

import shutil
from pathlib import Path

from minisgl.chapters.lab.catalog import find
from minisgl.chapters.lab.gates import capstone
from minisgl.chapters.lab.grader.clean_environment import clean_environment
from minisgl.chapters.lab.grader.grade import grade

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "minisgl-sjf"


def copy_example(tmp_path: Path) -> Path:
    """Copy the example package to a temporary folder."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "sjf", ignore=shutil.ignore_patterns("__pycache__")))


def test_example_package(tmp_path: Path) -> None:
    """The example passes the capstone's gates."""
    folder = copy_example(tmp_path)
    report = grade(find("capstone"), folder, only=["package", "found", "tests"])
    assert all(verdict.green for verdict in report.verdicts), [(v.cause, v.seen) for v in report.red]
    notes = {verdict.gate: verdict.note for verdict in report.verdicts}
    assert notes["found"] == "scheduler=sjf"
    assert notes["tests"].endswith("5 of them from PolicyConformance")


def test_missing_pytest(tmp_path: Path) -> None:
    """Without pytest, the gate `tests` does not run, and the other gates do."""
    folder = copy_example(tmp_path)
    env = capstone.environment(folder)
    (env.site / "hide.pth").write_text("import sys; sys.modules['pytest'] = None\n")
    found, tests, kit = grade(find("capstone"), folder, only=["found", "tests", "conformance"]).verdicts
    assert found.green and kit.green
    assert not tests.tried and not tests.cause
    assert (
        "runs the package's tests with pytest, which is not installed: pip install -e '.[lab]'  (not tried)"
        in tests.line()
    )


def test_missing_build_backend(tmp_path: Path) -> None:
    """If the package's build backend is not installed, no gate runs and each names the package to install."""
    folder = copy_example(tmp_path)
    project = (folder / "pyproject.toml").read_text("utf-8")
    (folder / "pyproject.toml").write_text(project.replace("setuptools.build_meta", "absent_backend.api"), "utf-8")
    report = grade(find("capstone"), folder, only=["package", "server"])
    assert [(verdict.tried, verdict.cause) for verdict in report.verdicts] == [(False, "")] * 2
    assert all("pip install absent_backend" in verdict.note for verdict in report.verdicts)
    assert not report.passed


def test_clean_environment(tmp_path: Path) -> None:
    """The environment imports the installed package, and is rebuilt only if the package has changed."""
    folder = copy_example(tmp_path)
    env = clean_environment(folder, tmp_path / "env")
    result = env.run("-c", "import minisgl_sjf, minisgl; print(minisgl_sjf.__file__)")
    assert Path(result.stdout.strip()).is_relative_to(env.site), result.stderr
    assert env.dist == "minisgl-sjf"
    made = (tmp_path / "env" / "made.json").stat().st_mtime_ns
    clean_environment(folder, tmp_path / "env")
    assert (tmp_path / "env" / "made.json").stat().st_mtime_ns == made, "an unchanged package is not rebuilt"
    (folder / "src" / "minisgl_sjf" / "more.py").write_text("")
    again = clean_environment(folder, tmp_path / "env")
    assert (again.site / "minisgl_sjf" / "more.py").is_file(), "a changed package is rebuilt"
