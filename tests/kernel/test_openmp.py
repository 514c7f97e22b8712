"""How torch's OpenMP threads wait, in processes of their own: the runtime reads its settings once."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch uses GNU's OpenMP runtime on Linux only")
MAKE = "import logging; logging.basicConfig(); from minisgl import LLM; LLM('tutor', overrides=['num_pages=8']).close()"


def run(program: str, **settings: str) -> tuple[dict[str, str], str]:
    """Run a program. Return the settings that its OpenMP runtime reports, and its standard error output."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", "OMP_NUM_THREADS": "2", **settings}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return dict(re.findall(r"(\w+) = '([^']*)'", done.stderr)), done.stderr


@pytest.mark.parametrize("program", ["from minisgl import LLM", "import minisgl, torch"])
def test_threads_wait_passively(program: str) -> None:
    """If minisgl is imported before torch, threads that wait give up their core at once."""
    settings, _ = run(program)
    assert (settings["OMP_WAIT_POLICY"], settings["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5000"), ("OMP_WAIT_POLICY", "ACTIVE")])
def test_setting_of_the_user_is_kept(name: str, value: str) -> None:
    settings, _ = run("from minisgl import LLM", **{name: value})
    assert settings[name] == value
    assert settings["GOMP_SPINCOUNT"] != "0"


def test_torch_before_minisgl_is_reported() -> None:
    """If torch came first, its threads spin, and each LLM says what to do; with a setting of the user it does not."""
    settings, errors = run(f"import torch; {MAKE}")
    assert settings["GOMP_SPINCOUNT"] != "0"
    assert errors.count("Import minisgl before torch, or set OMP_WAIT_POLICY=PASSIVE") == 1
    settings, errors = run(f"import torch; {MAKE}", OMP_WAIT_POLICY="PASSIVE")
    assert settings["GOMP_SPINCOUNT"] == "0"
    assert "OMP_WAIT_POLICY=PASSIVE in the environment" not in errors
    assert "OMP_WAIT_POLICY=PASSIVE in the environment" not in run(MAKE)[1]
