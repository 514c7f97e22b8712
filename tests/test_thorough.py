"""``@pytest.mark.thorough``: which cases of a test run without MINISGL_THOROUGH, and what the run says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("kernel", "rows"), [("sum", 1), ("sum", 2), ("norm", 1)])
def test_product(kernel, rows, size): ...


@pytest.mark.thorough(every=4)
@pytest.mark.parametrize("seed", range(10))
def test_seed(seed): ...


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_other(seed): ...
"""
SELECTED = [
    *("test_product[sum-1-1]", "test_product[sum-2-2]", "test_product[norm-1-3]", "test_product[sum-1-4]"),
    *("test_seed[0]", "test_seed[4]", "test_seed[8]"),
    *("test_other[0]", "test_other[1]", "test_other[3]"),
]


def run(folder: Path, *words: str, **env: str) -> str:
    """Run pytest on `TESTS` with this folder's conftest.py, and return its output."""
    shutil.copy(Path(__file__).parent / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    thorough\n    xdist_group\n")
    (folder / "test_it.py").write_text(TESTS)
    ours = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "MINISGL_THOROUGH")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py", *words]
    return subprocess.run(command, cwd=folder, env=clean | env, capture_output=True, text=True, check=True).stdout


def names(output: str) -> list[str]:
    return sorted(line.split("::")[1].split(" ")[0] for line in output.splitlines() if "::" in line)


def test_each_set_of_parameters_is_in_a_case(tmp_path: Path) -> None:
    output = run(tmp_path, "--collect-only", "-q")
    assert names(output) == sorted(SELECTED)
    assert "16 cases of tests marked thorough were left out" in output


def test_all_cases_with_the_variable(tmp_path: Path) -> None:
    output = run(tmp_path, "--collect-only", "-q", MINISGL_THOROUGH="1")
    assert len(names(output)) == 26
    assert "left out" not in output


def test_several_processes_say_it_once(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    output = run(tmp_path, "-n", "2", "--dist", "loadgroup")
    assert "10 passed" in output
    assert output.count("16 cases of tests marked thorough were left out") == 1
