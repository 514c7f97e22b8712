"""HTTPS: a real server with a certificate, a client that checks it, and files that can't be used."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from minisgl.config import ConfigError
from minisgl.plugins.http import HttpConfig
from minisgl.plugins.http.tls import check_tls
from minisgl.testing.serving import Server, patient_timeout

pytestmark = pytest.mark.xdist_group("test_tls")  # one process: the server starts once

CA = trustme.CA()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the paths of a certificate, its key, both in one file, and of files that can't be used."""
    folder = tmp_path_factory.mktemp("tls")
    made = CA.issue_cert("127.0.0.1")
    paths = {name: folder / f"{name}.pem" for name in ("cert", "key", "both", "other_key", "encrypted", "text")}
    for blob in made.cert_chain_pems:
        blob.write_to_path(paths["cert"], append=True)
    made.private_key_pem.write_to_path(paths["key"])
    made.private_key_and_cert_chain_pem.write_to_path(paths["both"])
    CA.issue_cert("127.0.0.1").private_key_pem.write_to_path(paths["other_key"])
    key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
    paths["encrypted"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    paths["text"].write_text("no certificate")
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def server(tiny: Path, files: dict[str, str]) -> Iterator[Server]:
    options = [f"server.tls_cert={files['cert']}", f"server.tls_key={files['key']}", "server.io_timeout=1"]
    with Server(f"model={tiny}", "num_pages=256", "log_level=warning", *options) as server:
        yield server


@pytest.fixture(scope="module")
def context() -> ssl.SSLContext:
    made = ssl.create_default_context()
    CA.configure_trust(made)
    return made


def test_requests_over_https(server: Server, context: ssl.SSLContext) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=server.url, verify=context, timeout=patient_timeout(60)) as client:
        assert client.get("/health").json() == {"status": "ok"}
        body = {"prompt": [5, 6], "max_tokens": 20, "ignore_eos": True}
        full = client.post("/v1/completions", json=body).json()
        assert full["usage"]["completion_tokens"] == 20
        stream = client.post("/v1/completions", json={**body, "stream": True}).text
        assert stream.endswith("data: [DONE]\n\n")
        assert "minisgl_open_requests 0.0" in client.get("/metrics").text


def test_certificate_is_checked(server: Server) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{server.url}/health", timeout=30)


def test_no_plain_http(server: Server, context: ssl.SSLContext) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url.replace('https', 'http')}/health", timeout=30)
    assert httpx.get(f"{server.url}/health", verify=context, timeout=30).status_code == 200


def test_slow_request_over_tls_is_ended(server: Server, context: ssl.SSLContext) -> None:
    """The limits of connections hold for encrypted ones too."""
    host, _, port = server.url.removeprefix("https://").rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=patient_timeout(60)) as plain,
        context.wrap_socket(plain, server_hostname=host) as client,
    ):
        client.sendall(b"POST /v1")
        data = b""
        while piece := client.recv(1 << 16):
            data += piece
    assert data.startswith(b"HTTP/1.1 408 ")
    assert "took too long" in json.loads(data.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("cert", "key", "why"),
    [
        ("nothing", None, "No such file"),
        ("text", None, "PEM"),
        ("cert", None, "PEM"),  # no key
        ("cert", "other_key", "mismatch|MISMATCH"),
        ("cert", "encrypted", "the key is encrypted"),
        ("cert", "text", "PEM"),
    ],
)
def test_unusable_files(files: dict[str, str], cert: str, key: str | None, why: str) -> None:
    paths = {"nothing": "/nothing.pem", **files}
    with pytest.raises(ConfigError, match=rf"(?s)server\.tls_.*({why})"):
        check_tls(HttpConfig(tls_cert=paths[cert], tls_key=None if key is None else paths[key]))


def test_usable_files(files: dict[str, str]) -> None:
    check_tls(HttpConfig())
    check_tls(HttpConfig(tls_cert=files["cert"], tls_key=files["key"]))
    check_tls(HttpConfig(tls_cert=files["both"]))
