"""No web pages of other sites may use the server, unless it has an API key (`minisgl.server.app.is_authorized`).

A web page may send requests to a server that its visitor can reach, such as one at 127.0.0.1, without a preflight
request if the body is "plain text". The browser then hides the response from the page, but the server computes it. So
the server looks at two headers that a page can't set:

- ``Origin``, which browsers add to each POST request, must name the host of the request, or an origin of
  ``server.cors_origins``;
- ``Host`` must not be the name of a site in the internet, if the server listens at a loopback address. Such a site
  could let its name resolve to 127.0.0.1 (DNS rebinding), and its pages would be of the same origin as the server.

With an API key, neither is checked: a page of another site does not have the key. In any case a body must be JSON, as
its ``Content-Type`` says, and not compressed.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http import HttpConfig
from minisgl.sampling_params import shorten
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json
from minisgl.server.request_record import record_of
from minisgl.utils.process import is_loopback

_MEDIA = "unsupported_media_type"
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^:\[\]]*)(?::([0-9]*))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Access(config.server)


class Access(HttpExtension):
    """Refuses requests of pages whose origin or host is not allowed, and tells browsers which origins are."""

    options = ("cors_origins", "allowed_hosts")

    def __init__(self, server: HttpConfig):
        self._server = server

    def check_headers(self, headers: Headers) -> None:
        """Raise `ApiError` unless the headers of a request describe a JSON body that is not compressed.

        A request without ``Content-Type`` is taken for JSON.
        """
        kind, _, parameters = headers.get("content-type", "application/json").lower().partition(";")
        charset = re.search(r"charset\s*=\s*\"?([^\s;\"]*)", parameters)
        if kind.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8", "us-ascii")):
            given = shorten(repr(headers["content-type"]))
            message = f"The Content-Type is {given}, but the body must be JSON in UTF-8. Send the header Content-Type: "
            raise ApiError(415, f"{message}application/json (curl: -H 'Content-Type: application/json').", code=_MEDIA)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            message = f"The Content-Encoding {shorten(repr(encoding))} is not supported: send the body uncompressed."
            raise ApiError(415, message, code=_MEDIA, headers={"accept-encoding": "identity"})
        coding = headers.get("transfer-encoding", "chunked").strip().lower()
        if coding != "chunked":
            message = f"The Transfer-Encoding {shorten(repr(coding))} is not supported, only 'chunked'."
            raise ApiError(501, message)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        server, origins = self._server, tuple(self._server.cors_origins)
        if origins:
            app = CORSMiddleware(
                app,
                allow_origins=origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),
                expose_headers=("X-Request-Id",),
            )
        if server.api_key is not None:
            return app
        return BrowserCheck(app, origins, tuple(server.allowed_hosts) if is_loopback(server.host) else None)


class BrowserCheck:
    """ASGI middleware that refuses requests of web pages of other sites with 403.

    ``origins`` are the allowed origins of pages, or ``*``. ``hosts`` are the allowed names in the header ``Host``, or
    ``*``; None: the header is not checked.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], hosts: tuple[str, ...] | None):
        self._app, self._origins, self._hosts = app, origins, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["method"], Headers(scope=scope))
            except ApiError as error:
                record_of(scope).error = error.message
                await Json(error.body, error.status, error.headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and "*" not in self._hosts and not _is_allowed(host, self._hosts):
            message = (
                f"The header Host is {shorten(repr(host))}, which is no name of this server: it listens at a loopback "
                "address. To allow a name, such as a proxy's, add it to server.allowed_hosts."
            )
            raise ApiError(403, message, code="host_not_allowed")
        if origin is None or method in ("GET", "HEAD", "OPTIONS"):
            return
        if "*" not in self._origins and origin not in self._origins and not _is_same(origin, host):
            message = (
                f"The request comes from a web page of {shorten(repr(origin))}, which may not use this server. To "
                "allow it, add this origin to server.cors_origins."
            )
            raise ApiError(403, message, code="origin_not_allowed")


def _split(host: str) -> tuple[str, str]:
    """Return the name and the port of a header ``Host``, in small letters. The port may be empty."""
    found = _HOST.fullmatch(host.strip().lower())
    return (found[1].rstrip("."), found[2] or "") if found else (host, "")


def _is_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    """Return whether a header ``Host`` has an allowed name, or one that no site in the internet has.

    These are addresses, names without a dot, and the names below ``localhost``.
    """
    name, _ = _split(host)
    if "." not in name or name.endswith(".localhost") or name in map(str.lower, allowed):
        return True
    try:
        return bool(ipaddress.ip_address(name.strip("[]").partition("%")[0]))
    except ValueError:
        return False


def _is_same(origin: str, host: str) -> bool:
    """Return whether a page of ``origin`` is of the host to which it sends a request."""
    scheme, _, rest = origin.lower().partition("://")
    default = _DEFAULT_PORTS.get(scheme)
    if default is None:
        return False
    own, asked = _split(rest), _split(host)
    return bool(own[0]) and (own[0], own[1] or default) == (asked[0], asked[1] or default)
