"""The option ``server.root_path``: the prefix under which a proxy publishes the server."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.extension import HttpExtension


@hookimpl
def minisgl_http(config: Config) -> HttpExtension | None:
    return RootPath(config.server.root_path) if config.server.root_path else None


class RootPath(HttpExtension):
    """Lets the paths of requests have the prefix ``root``, which has no slash at its end."""

    def __init__(self, root: str):
        self._root = root

    def wrap(self, app: ASGIApp) -> ASGIApp:
        root = self._root

        async def rooted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":  # add the prefix unless the proxy left it there; the routes remove it again
                path = scope["path"]
                prefixed = path == root or path.startswith(f"{root}/")
                scope["root_path"], scope["path"] = root, path if prefixed else root + path
            await app(scope, receive, send)

        return rooted
