"""HTTPS: the options ``server.tls_cert`` and ``server.tls_key``. uvicorn does the rest."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from minisgl import hookimpl
from minisgl.config import Config, ConfigError
from minisgl.plugins.http import HttpConfig
from minisgl.server.extension import HttpExtension


@hookimpl
def minisgl_http(config: Config) -> HttpExtension | None:
    return None if config.server.tls_cert is None else Tls(config.server)


class Tls(HttpExtension):
    """Serves HTTPS only. Raise `ConfigError` if the files can't be used."""

    options = ("tls_cert", "tls_key")

    def __init__(self, server: HttpConfig):
        check_tls(server)
        self._server = server

    def uvicorn_options(self) -> Mapping[str, Any]:
        return {"ssl_certfile": self._server.tls_cert, "ssl_keyfile": self._server.tls_key}


def check_tls(server: HttpConfig) -> None:
    """Raise `ConfigError` if the files of ``server.tls_cert`` and ``server.tls_key`` can't be used."""
    if server.tls_cert is None:
        return

    def no_password() -> str:
        name = server.tls_key or server.tls_cert
        raise ConfigError(f"server.tls_key={name}: the key is encrypted. Give a file with a key that is not.")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.tls_cert, server.tls_key, no_password)
    except OSError as error:  # ssl.SSLError is one too
        files = f"server.tls_cert={server.tls_cert}" + (f" server.tls_key={server.tls_key}" if server.tls_key else "")
        raise ConfigError(
            f"{files}: {error.strerror or error}. Give a certificate and its private key in PEM format."
        ) from error
