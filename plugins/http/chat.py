"""All parameters of chats: log-probabilities, penalties, grammars, messages with tools, and the others of the APIs."""

from __future__ import annotations

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.parameters import FullFormat
from minisgl.server.extension import HttpExtension


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return FullFormat()
