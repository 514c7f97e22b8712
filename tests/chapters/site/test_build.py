"""The published site has edit links to the files of the repository; a site on disk has none, and asks no server."""

from __future__ import annotations

from pathlib import Path

import pytest
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from minisgl.chapters.site import build

ROOT = Path(__file__).resolve().parents[3]
REPOSITORY = "https://github.com/owner/name"


def configure(monkeypatch: pytest.MonkeyPatch, **environment: str) -> MkDocsConfig:
    for name in ("SITE_REPOSITORY", "SITE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = load_config(str(ROOT / "mkdocs.yml"))
    config.plugins._current_plugin = None  # mkdocs sets it while it calls a hook
    return build.on_config(config)


def edit_address(config: MkDocsConfig, name: str) -> str | None:
    files = build.on_files(Files([]), config)
    file = files.get_file_from_path(name) or build.File(name, config.docs_dir, config.site_dir, False)
    return Page(None, file, config).edit_url


def test_published_page_links_to_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(monkeypatch, SITE_REPOSITORY=REPOSITORY, SITE_URL="https://owner.github.io/name/")
    assert (
        edit_address(config, "chapters/04_attention/index.md")
        == f"{REPOSITORY}/edit/main/chapters/04_attention/index.md"
    )
    assert edit_address(config, "course.md") == f"{REPOSITORY}/edit/main/docs/course.md"
    assert config.extra["version"] == {"provider": "mike"}
    assert "content.action.edit" in config.theme["features"]


def test_site_on_disk_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(monkeypatch)
    assert not config.repo_url and not config.site_url and "version" not in config.extra
    assert edit_address(config, "course.md") is None
