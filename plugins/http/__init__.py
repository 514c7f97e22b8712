"""The extensions of the API server, one file each: `minisgl.server.extension` says what they may do and loads them.

`HttpConfig` declares and checks the options of the section ``server`` that they use.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from minisgl.config import ServerConfig, checker

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
MIN_BODY = 2**20
"""The smallest default of ``server.max_body``, in bytes."""
BODY_BYTES_PER_TOKEN = 64
"""The bytes of a body that the default of ``server.max_body`` allows for each token of the context."""


@dataclass
class HttpConfig(ServerConfig):
    """Options of the HTTP server, its processes and its extensions."""

    admin_key: str | None = None
    """If set, a request with the header ``Authorization: Bearer <admin_key>`` may empty the prefix cache
    (``/flush_cache``) and abort requests (``/abort_request``). Default: no request may."""
    max_body: int | None = None
    """Maximum size of a request's body in bytes. A larger one gets HTTP status 413. Default: 64 bytes for each token
    that the server allows for a request, and at least 1 MiB."""
    max_choices: int | None = None
    """Maximum number of choices of one HTTP request: ``n`` for each prompt. More get HTTP status 400. Default: a
    quarter of ``max_queued``, but not less than 128."""
    max_connections: int = 8192
    """Maximum number of open connections; the limit of file descriptors may allow fewer. A new connection above it
    takes the place of one that waits for a request, or gets HTTP status 503."""
    io_timeout: float = 30.0
    """Seconds that a client may take to send a request's headers or the next 64 KiB of its body, or to read the next
    part of a response. Then the server closes the connection."""
    watchdog: float = 300.0
    """Seconds after which a process that is still busy with the same step or message counts as dead. The server then
    stops. 0 turns the watchdog off."""
    request_timeout: float | None = None
    """Seconds that a request may take from its arrival to the end of its response. Then it is aborted, and its response
    is an error with HTTP status 504, or ends with one. Default: no limit."""
    root_path: str = ""
    """The prefix under which a proxy publishes the server, such as ``/llm``. The proxy may remove the prefix or leave
    it in the paths of requests."""
    cors_origins: list[str] = field(default_factory=list)
    """The origins, such as ``https://chat.example.com``, whose web pages may call the server from a browser. ``*``
    allows all. Pages of the server's own host may always. Default: no others."""
    allowed_hosts: list[str] = field(default_factory=list)
    """The names, such as ``llm.example.com``, that the header ``Host`` may have if the server listens at a loopback
    address and has no ``api_key``: those of proxies. Addresses and names without a dot are always allowed, ``*`` allows
    all. This keeps out web sites whose name resolves to the server's address. Default: no others."""
    tls_cert: str | None = None
    """A file in PEM format with the server's certificate and those of its authorities. The server then speaks HTTPS
    only."""
    tls_key: str | None = None
    """A file in PEM format with the certificate's private key, not encrypted. Default: ``tls_cert`` has the key too."""
    otlp_endpoint: str | None = None
    """The address of an OpenTelemetry collector, such as ``http://localhost:4318``, that gets a span of each generation
    (OTLP over HTTP). It needs ``minisgl[otel]``. Default: no traces."""
    responses_store: str = "none"
    """Where ``/v1/responses`` stores responses: ``none``, or ``memory``, which keeps the last ones, at most 64 MiB.
    Each client with the API key can read a stored response whose id it knows."""

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range."""
        super().check()
        need = checker(self, "server.")
        need(self.admin_key != "", "admin_key", "a key, or null for none")
        need(self.max_connections >= 1, "max_connections", "at least 1")
        need(self.max_body is None or self.max_body >= 1, "max_body", "at least 1, or null for the default")
        choices_ok = self.max_choices is None or 1 <= self.max_choices <= self.max_queued
        need(choices_ok, "max_choices", "from 1 to server.max_queued, or null for the default")
        need(math.isfinite(self.watchdog) and self.watchdog >= 0.0, "watchdog", "a number of seconds, at least 0")
        need(math.isfinite(self.io_timeout) and self.io_timeout > 0.0, "io_timeout", "a number of seconds above 0")
        timeout = self.request_timeout
        seconds_ok = timeout is None or (math.isfinite(timeout) and timeout > 0.0)
        need(seconds_ok, "request_timeout", "a number of seconds above 0, or null for no limit")
        root_ok = self.root_path == "" or re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path) is not None
        need(root_ok, "root_path", "a path such as /llm, without a slash at its end, or empty")
        origins_ok = all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in self.cors_origins)
        need(origins_ok, "cors_origins", "a list of origins such as https://example.com:8443 (no path), or [*]")
        hosts_ok = all(host == "*" or _HOST_NAME.fullmatch(host) for host in self.allowed_hosts)
        need(hosts_ok, "allowed_hosts", "a list of names such as llm.example.com (no port), or [*]")
        need(self.tls_cert != "", "tls_cert", "a file, or null for no TLS")
        need(self.tls_key is None or self.tls_cert is not None, "tls_key", "used with tls_cert")
        url = self.otlp_endpoint
        url_ok = url is None or re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", url) is not None
        need(url_ok, "otlp_endpoint", "a URL such as http://localhost:4318, or null for no traces")
        need(self.responses_store in ("none", "memory"), "responses_store", "none or memory")

    def body_limit(self, max_seq_len: int) -> int:
        """Return the largest size of a body in bytes. ``max_seq_len``: the most tokens of a request, or 0."""
        return self.max_body or max(MIN_BODY, BODY_BYTES_PER_TOKEN * max_seq_len)
