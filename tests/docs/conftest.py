"""Fixtures: the site, built once for all workers of a test run, and a browser if one is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 800.0
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site, or ``MINISGL_SITE`` if this variable is set.

    A warning, or an error in the code of a page, fails the build.
    """
    if ready := os.environ.get("MINISGL_SITE"):
        return Path(ready).resolve()
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    folder, lock, done = base / "site", base / "site.lock", base / "site.done"
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # another worker builds the site
        until = time.monotonic() + BUILD_SECONDS
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.2)
        assert done.read_text() == "built", "another worker could not build the site"
        return folder
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    done.write_text("built" if built.returncode == 0 else "failed")
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="session")
def chrome() -> Iterator[Chrome]:
    """Return headless Chromium, one for all tests."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("Chromium or its driver is not installed (Debian: apt-get install chromium chromium-driver)")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS.split():
        options.add_argument(flag)
    driven = Chrome(options=options, service=Service(driver))
    yield driven
    driven.quit()


@pytest.fixture
def browser(chrome: Chrome) -> Chrome:
    """Return headless Chromium with an empty log: the pages of earlier tests may still have written to it."""
    chrome.get("about:blank")
    chrome.get_log("browser")
    return chrome
