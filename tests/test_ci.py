"""`.ci/run` without a browser: it skips the browser tests, and reports that at its beginning and at its end."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / ".ci" / "run"
TOOLS = ("bash", "dirname", "mktemp", "rm", "tee", "grep", "tail", "tr", "sed")
MESSAGE = "browser: Chromium is not installed and could not be installed: the tests that look at pages are skipped"


def run(tmp_path: Path, **stubs: str) -> subprocess.CompletedProcess[str]:
    """Run the script in an environment that has only the commands `TOOLS` and ``stubs``: name → shell code."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci")
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    for name, body in {"make": 'echo "make $1"; echo "3 passed in 1 s"', "id": "echo 0", **stubs}.items():
        (tmp_path / "bin" / name).write_text(f"#!{tmp_path}/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": str(tmp_path / "bin"), "TMPDIR": str(tmp_path)}
    words = [str(tmp_path / "bin" / "bash"), str(tmp_path / ".ci" / "run")]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("installer", [{}, {"apt-get": "exit 100"}], ids=["no apt-get", "apt-get fails"])
def test_without_browser(tmp_path: Path, installer: dict[str, str]) -> None:
    ran = run(tmp_path, **installer)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0] == lines[-2] == MESSAGE
    assert "make docs" in lines and lines[-1].startswith("tests: 3 passed")


def test_with_browser(tmp_path: Path) -> None:
    ran = run(tmp_path, chromium="", chromedriver="")
    assert ran.returncode == 0
    assert "browser" not in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("tests: 3 passed")


def test_failure(tmp_path: Path) -> None:
    ran = run(tmp_path, make='[ "$1" != demo ] || exit 3', chromium="", chromedriver="")
    assert ran.returncode == 3


@pytest.mark.xdist_group("groups")
def test_groups_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest 9.2 and pytest-xdist 3.8 ignore the mark, and each process then starts the servers of a group again."""
    expected = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@groups") == expected, "install the versions of constraints.txt"
