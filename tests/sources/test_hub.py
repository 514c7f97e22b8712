"""`plugins/sources/hub.py`. What the hub's cache has is tested in tests/models/test_resolve.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.models import resolve
from minisgl.plugins.sources.hub import minisgl_find_model


def test_a_directory_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert minisgl_find_model("org/tiny") is None
    assert minisgl_find_model("./org") is None
    assert minisgl_find_model("tutor") is None


def test_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id of the hub is refused with the name of the plugin."""
    monkeypatch.setattr(resolve, "HUB", "minisgl.plugins.sources.deleted")
    monkeypatch.setattr(resolve, "_finders", lambda: resolve.PluginManager(light=True))
    with pytest.raises(ConfigError, match=r"needs the plugin plugins/sources/hub, which is missing"):
        resolve.resolve_model("org/tiny")
