"""The handshake of rank 0 with another rank: both prove that they know the secret, and agree on the session's keys.

The other rank connects and sends `Hello` with a nonce. Rank 0 answers with a nonce of its own and the proof that it
knows the secret. The other rank checks the proof and sends its own. Proofs and keys are HMAC-SHA256 values of the
secret over both nonces and all of `Hello`, each with a label of its own: a recorded handshake can't be repeated, and no
proof can be used as a key or as the other side's proof. The secret itself is never sent.

Until the other side has proved that it knows the secret, at most `MAX_BYTES` bytes are read from it for a message.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from minisgl.cluster.multi_node.frames import ChannelError, Session
from minisgl.config import ConfigError

PROTOCOL = 1
"""The version of handshake and frames. Both sides must have the same."""
MAX_BYTES = 512
"""Largest size of a message of the handshake."""
HANDSHAKE_SECONDS = 10.0
"""Seconds that the other side may take for a handshake."""
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
_NONCE_BYTES = 32
_LENGTH = struct.Struct("!I")


class Hello(msgspec.Struct, tag="minisgl-hello", array_like=True, frozen=True):
    """The first message, from rank ``rank`` of ``size``."""

    protocol: int
    version: str
    rank: int
    size: int
    nonce: bytes


class Challenge(msgspec.Struct, tag="minisgl-challenge", array_like=True, frozen=True):
    """Rank 0's answer to `Hello`."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag="minisgl-proof", array_like=True, frozen=True):
    """The last message of the handshake, from the other rank."""

    proof: bytes


class WrongSecretError(ChannelError):
    """The other side does not know the secret."""


T = TypeVar("T", Hello, Challenge, Proof)


def read_secret(name: str) -> bytes:
    """Return the secret in the file ``name``, without blanks and line ends around it.

    Raise `ConfigError` if the file can't be read, if users other than its owner can access it, if its owner is neither
    this process's user nor root, or if the secret has fewer than `MIN_SECRET_BYTES` bytes.
    """
    given = f"multi_node.secret_file={name}"
    try:
        descriptor = os.open(Path(name).expanduser(), os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block the start
    except OSError as error:
        raise ConfigError(f"{given}: {error.strerror}.") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{given}: this is no regular file.")
        if found.st_uid not in (os.getuid(), 0):
            raise ConfigError(f"{given}: the file belongs to another user (uid {found.st_uid}).")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise ConfigError(f"{given}: other users can access it (mode {mode:04o}). Run: chmod 600 {name}")
        secret = os.read(descriptor, MAX_SECRET_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{given}: the secret must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes. To make one: "
            "openssl rand -hex 32"
        )
    return secret


def greet(sock: socket.socket, secret: bytes, version: str, rank: int, size: int) -> Session:
    """Run the handshake as rank ``rank`` of ``size`` and return the session.

    ``version`` is this side's version of minisgl. Raise `WrongSecretError` if rank 0 has another secret, and
    `ChannelError` if it closes the connection, or takes longer than `HANDSHAKE_SECONDS`.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    hello = Hello(PROTOCOL, version, rank, size, os.urandom(_NONCE_BYTES))
    _send(sock, hello, deadline)
    challenge = _receive(sock, Challenge, deadline)
    keys = _Keys(secret, hello, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, keys.leader_proof):
        raise WrongSecretError("rank 0 has another secret")
    _send(sock, Proof(keys.follower_proof), deadline)
    return Session(send_key=keys.to_leader, receive_key=keys.to_follower)


def answer(sock: socket.socket, secret: bytes, version: str, size: int) -> tuple[int, Session]:
    """Run the handshake as rank 0 of ``size`` with a new connection. Return the other side's rank, and the session.

    Raise `WrongSecretError` if the other side has another secret, and `ChannelError` if it is no rank of this server.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    hello = _receive(sock, Hello, deadline)
    if len(hello.nonce) != _NONCE_BYTES:
        raise ChannelError("the nonce has a wrong size")
    nonce = os.urandom(_NONCE_BYTES)
    keys = _Keys(secret, hello, nonce)
    _send(sock, Challenge(nonce, keys.leader_proof), deadline)
    if not hmac.compare_digest(_receive(sock, Proof, deadline).proof, keys.follower_proof):
        raise WrongSecretError("the other side has another secret")
    if (hello.protocol, hello.version) != (PROTOCOL, version):
        raise ChannelError(f"rank {hello.rank} has minisgl {hello.version}, rank 0 has {version}")
    if hello.size != size or not 0 < hello.rank < size:
        raise ChannelError(f"rank {hello.rank} of {hello.size} connected to rank 0 of {size}")
    return hello.rank, Session(send_key=keys.to_follower, receive_key=keys.to_leader)


class _Keys:
    """The proofs and keys of one session, from the secret and all that was sent before."""

    def __init__(self, secret: bytes, hello: Hello, nonce: bytes):
        transcript = hashlib.sha256(msgspec.msgpack.encode(hello)).digest() + hashlib.sha256(nonce).digest()

        def derived(label: bytes) -> bytes:
            return hmac.digest(secret, b"minisgl steps: " + label + transcript, "sha256")

        self.leader_proof, self.follower_proof = derived(b"proof of rank 0"), derived(b"proof of a follower")
        self.to_leader, self.to_follower = derived(b"frames to rank 0"), derived(b"frames from rank 0")


def _send(sock: socket.socket, message: msgspec.Struct, deadline: float) -> None:
    body = msgspec.msgpack.encode(message)
    _limit(sock, deadline)
    try:
        sock.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
        raise ChannelError(f"the connection broke during the handshake ({error})") from error


def _receive(sock: socket.socket, kind: type[T], deadline: float) -> T:
    (size,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    if size > MAX_BYTES:
        raise ChannelError(f"a message of the handshake announces {size} bytes: at most {MAX_BYTES} are allowed")
    body = _read(sock, size, deadline)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ChannelError(f"{size} bytes are no {kind.__name__}: {error}") from error


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        _limit(sock, deadline)
        try:
            part = sock.recv(size - len(data))
        except OSError as error:
            raise ChannelError(f"the connection broke during the handshake ({error})") from error
        if not part:
            raise ChannelError("the other side closed the connection during the handshake")
        data += part
    return data


def _limit(sock: socket.socket, deadline: float) -> None:
    """Give the next call on ``sock`` the time that is left until ``deadline``."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise ChannelError(f"the handshake took longer than {HANDSHAKE_SECONDS:g} s")
    sock.settimeout(left)
