"""The handshake of two ranks, the secret's file, and what strangers can send."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.cluster.multi_node import handshake
from minisgl.cluster.multi_node.frames import Beat, ChannelError, Session
from minisgl.cluster.multi_node.handshake import (
    MAX_BYTES,
    PROTOCOL,
    Challenge,
    Hello,
    Proof,
    WrongSecretError,
    answer,
    greet,
    read_secret,
)
from minisgl.config import ConfigError

SECRET = b"0123456789abcdef"


def sealed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def meet(
    ours: Callable[[socket.socket], Any], theirs: Callable[[socket.socket], Any]
) -> tuple[Any, Any, list[socket.socket]]:
    """Run both sides of a connection. Return their results, which are exceptions if they failed, and the sockets."""
    sockets = socket.socketpair()

    def run(side: Callable[[socket.socket], Any], sock: socket.socket) -> Any:
        try:
            return side(sock)
        except (ChannelError, OSError) as error:
            sock.close()  # as the process does that ends
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, (ours, theirs), sockets))
    return results[0], results[1], list(sockets)


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def test_same_secret() -> None:
    """Both sides get a session of their own, and rank 0 learns the rank."""
    seals = []
    for _ in range(2):
        (rank, down), up, sockets = meet(
            lambda sock: answer(sock, SECRET, "1", 4), lambda sock: greet(sock, SECRET, "1", 3, 4)
        )
        assert rank == 3
        seals.append(up.seal(Beat()))
        down.feed(seals[-1])
        assert down.next() == Beat()
        close(sockets)
    assert seals[0] != seals[1]


def test_wrong_secret() -> None:
    """A side with another secret is refused by both, and rank 0 sends nothing that depends on what it received."""
    leader, follower, sockets = meet(
        lambda sock: answer(sock, SECRET, "1", 2), lambda sock: greet(sock, b"another secret!!", "1", 1, 2)
    )
    assert isinstance(follower, WrongSecretError)
    assert isinstance(leader, ChannelError)  # the other side closed the connection
    close(sockets)


def forger(sock: socket.socket) -> None:
    """Play a rank that does not know the secret: accept any proof of rank 0, and send a proof of its own."""
    sock.sendall(sealed(Hello(PROTOCOL, "1", 1, 2, bytes(32))))
    sock.recv(1000)
    sock.sendall(sealed(Proof(os.urandom(32))))
    sock.recv(1)


def reflector(sock: socket.socket) -> None:
    """Send rank 0's own proof back to it."""
    sock.sendall(sealed(Hello(PROTOCOL, "1", 1, 2, bytes(32))))
    challenge = msgspec.msgpack.decode(sock.recv(1000)[4:], type=Challenge)
    sock.sendall(sealed(Proof(challenge.proof)))
    sock.recv(1)


@pytest.mark.parametrize("stranger", [forger, reflector])
def test_stranger_without_the_secret(stranger: Callable[[socket.socket], None]) -> None:
    leader, _, sockets = meet(lambda sock: answer(sock, SECRET, "1", 2), stranger)
    assert isinstance(leader, WrongSecretError)
    close(sockets)


def test_recorded_handshake_is_refused() -> None:
    """All that a rank sent once is worth nothing at the next handshake, because rank 0's nonce is another one."""
    sent: list[bytes] = []

    class Recorder:
        def __init__(self, sock: socket.socket):
            self.recv, self.settimeout, self._sock = sock.recv, sock.settimeout, sock

        def sendall(self, data: bytes) -> None:
            sent.append(data)
            self._sock.sendall(data)

    _, first, sockets = meet(
        lambda sock: answer(sock, SECRET, "1", 2),
        lambda sock: greet(Recorder(sock), SECRET, "1", 1, 2),  # type: ignore[arg-type]
    )
    assert isinstance(first, Session)
    close(sockets)

    def replay(sock: socket.socket) -> None:
        for data in sent:
            sock.sendall(data)
        sock.recv(1000)

    leader, _, sockets = meet(lambda sock: answer(sock, SECRET, "1", 2), replay)
    assert isinstance(leader, WrongSecretError)
    close(sockets)


def test_changed_rank_is_refused() -> None:
    """The proofs depend on the whole first message: if someone changes the rank in it, the connection is refused."""

    class Changer:
        def __init__(self, sock: socket.socket):
            self.recv, self.settimeout, self._sock = sock.recv, sock.settimeout, sock

        def sendall(self, data: bytes) -> None:
            hello = msgspec.msgpack.decode(data[4:], type=Hello)
            self._sock.sendall(sealed(Hello(hello.protocol, hello.version, 2, hello.size, hello.nonce)))

    _, follower, sockets = meet(
        lambda sock: answer(sock, SECRET, "1", 3),
        lambda sock: greet(Changer(sock), SECRET, "1", 1, 3),  # type: ignore[arg-type]
    )
    assert isinstance(follower, WrongSecretError)
    close(sockets)


@pytest.mark.parametrize(
    ("version", "rank", "size"), [("2", 1, 2), ("1", 1, 3), ("1", 0, 2), ("1", 2, 2), ("1", -1, 2)]
)
def test_ranks_that_do_not_fit(version: str, rank: int, size: int) -> None:
    """A rank of another version or number of ranks is refused, also if it knows the secret."""
    leader, _, sockets = meet(
        lambda sock: answer(sock, SECRET, "1", 2), lambda sock: greet(sock, SECRET, version, rank, size)
    )
    assert isinstance(leader, ChannelError) and not isinstance(leader, WrongSecretError)
    assert str(rank) in str(leader)
    close(sockets)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ((MAX_BYTES + 1).to_bytes(4, "big"), f"announces {MAX_BYTES + 1} bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "announces"),
        (sealed([1, 2, 3]), "no Hello"),
        (sealed(Proof(bytes(32))), "no Hello"),
        (len(pickle.dumps({})).to_bytes(4, "big") + pickle.dumps({}), "no Hello"),
        (sealed(Hello(PROTOCOL, "1", 1, 2, b"")), "nonce"),
        (b"\0\0", "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_junk_before_the_proof(data: bytes, expected: str) -> None:
    def junk(sock: socket.socket) -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    leader, _, sockets = meet(lambda sock: answer(sock, SECRET, "1", 2), junk)
    assert isinstance(leader, ChannelError) and expected in str(leader)
    close(sockets)


@pytest.mark.parametrize("piece", [b"", b"\0"])
def test_slow_stranger(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    """A side that sends nothing, or a byte now and then, is refused when the time for the handshake is over."""
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    done = threading.Event()

    def slow(sock: socket.socket) -> None:
        while not done.wait(0.05):
            sock.sendall(piece)

    def leader(sock: socket.socket) -> Any:
        try:
            return answer(sock, SECRET, "1", 2)
        finally:
            done.set()

    error, _, sockets = meet(leader, slow)
    assert isinstance(error, ChannelError)
    close(sockets)


# ---- the file ----------------------------------------------------------------------------------------


def test_secret_file(tmp_path: Path) -> None:
    """Blanks and line ends around the secret do not count, and the file may be a link, as in Kubernetes."""
    file, link = tmp_path / "secret", tmp_path / "link"
    file.write_bytes(b"\n " + SECRET + b" \r\n")
    file.chmod(0o600)
    link.symlink_to(file)
    assert read_secret(str(file)) == read_secret(str(link)) == SECRET
    file.chmod(0o400)
    assert read_secret(str(file)) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601, 0o610])
def test_file_that_others_can_access(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{mode:04o}.*chmod 600"):
        read_secret(str(file))


@pytest.mark.parametrize(("content", "expected"), [(b"short", "16 to"), (b"", "16 to"), (b"x" * 5000, "16 to")])
def test_secret_of_a_wrong_size(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=expected):
        read_secret(str(file))


def test_no_secret_file(tmp_path: Path) -> None:
    """A missing file, a folder and a pipe are refused. A pipe without a writer does not block the start."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, expected in (("missing", "No such file"), ("pipe", "no regular file"), (".", "no regular file")):
        with pytest.raises(ConfigError, match=expected):
            read_secret(str(tmp_path / name))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_user(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match="another user"):
        read_secret(str(file))
