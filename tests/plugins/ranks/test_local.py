"""`plugins/ranks/local.py`. Servers with several ranks are tested in tests/server."""

from __future__ import annotations

import pytest

from minisgl.config import ConfigError
from minisgl.server import serve


def test_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a server with several ranks needs it, and says so."""
    monkeypatch.setattr(serve, "LOCAL_RANKS", "minisgl.plugins.ranks.deleted")
    assert serve.all_ranks(1) == [serve.run_rank]
    with pytest.raises(ConfigError, match=r"tp=2 needs the plugin plugins/ranks/local, which is missing"):
        serve.all_ranks(2)
