"""The example in docs/examples is a package like a student's: built, installed in a clean environment, tested there."""

from __future__ import annotations

import shutil
from pathlib import Path

from minisgl.course.lab.catalog import find
from minisgl.course.lab.gates import capstone
from minisgl.course.lab.grader.clean_environment import clean
from minisgl.course.lab.grader.grade import grade

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "minisgl-sjf"


def test_the_example_package_works_in_a_clean_environment(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "sjf", ignore=shutil.ignore_patterns("__pycache__")))
    report = grade(find("capstone"), folder, only=["package", "found", "tests"])
    assert all(verdict.green for verdict in report.verdicts), [(v.cause, v.seen) for v in report.red]
    notes = {verdict.gate: verdict.note for verdict in report.verdicts}
    assert notes["found"] == "scheduler=sjf"
    assert notes["tests"].endswith("5 of them PolicyConformance's")


def test_without_pytest_its_gate_is_not_tried_and_the_others_are(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "sjf", ignore=shutil.ignore_patterns("__pycache__")))
    env = capstone.environment(folder)
    (env.site / "hide.pth").write_text("import sys; sys.modules['pytest'] = None\n")
    found, tests, kit = grade(find("capstone"), folder, only=["found", "tests", "conformance"]).verdicts
    assert found.green and kit.green
    assert not tests.tried and not tests.cause
    assert "runs its tests with pytest, which is not installed: pip install -e '.[lab]'  (not tried)" in tests.line()


def test_without_what_builds_it_no_gate_is_tried(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "sjf", ignore=shutil.ignore_patterns("__pycache__")))
    project = (folder / "pyproject.toml").read_text("utf-8")
    (folder / "pyproject.toml").write_text(project.replace("setuptools.build_meta", "absent_backend.api"), "utf-8")
    report = grade(find("capstone"), folder, only=["package", "server"])
    assert [(verdict.tried, verdict.cause) for verdict in report.verdicts] == [(False, "")] * 2
    assert all("pip install absent_backend" in verdict.note for verdict in report.verdicts)
    assert not report.passed


def test_a_clean_environment_has_the_package_and_not_its_folder(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "sjf", ignore=shutil.ignore_patterns("__pycache__")))
    env = clean(folder, tmp_path / "env")
    told = env.run("-c", "import minisgl_sjf, minisgl; print(minisgl_sjf.__file__)")
    assert Path(told.stdout.strip()).is_relative_to(env.site), told.stderr
    assert env.dist == "minisgl-sjf"
    made = (tmp_path / "env" / "made.json").stat().st_mtime_ns
    clean(folder, tmp_path / "env")
    assert (tmp_path / "env" / "made.json").stat().st_mtime_ns == made, "nothing changed: it is used again"
    (folder / "src" / "minisgl_sjf" / "more.py").write_text("")
    again = clean(folder, tmp_path / "env")
    assert (again.site / "minisgl_sjf" / "more.py").is_file(), "a change is built"
