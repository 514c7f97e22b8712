"""The frames between rank 0 and the rank of another process group: messages, authenticated and numbered.

This module knows no socket: `Session` turns messages into bytes and bytes into messages. A frame is a header (the
length of its body and the frame's number), a tag and a body. The tag is the HMAC-SHA256 of header and body under the
session's key for this direction, so a frame of another session, of the other direction or of another sender is refused.
The frames of a direction are numbered from 0 without gaps, so a frame that is repeated, left out or moved is refused.
The body is MessagePack.
"""

from __future__ import annotations

import hmac
import struct
from typing import TypeAlias

import msgspec

MAX_BODY_BYTES = 256 << 20
"""Largest body of a frame. A step's largest part are the tokens of the requests with penalties that it admits: at most
256 requests, each with 4 bytes for each token of its context."""
_HEADER = struct.Struct("!IQ")
_TAG_BYTES = 32
_OVERHEAD = _HEADER.size + _TAG_BYTES


class ChannelError(Exception):
    """The other side of a channel is gone, or sent bytes that a correct peer does not send."""


class _Message(msgspec.Struct, tag=True, array_like=True):
    """The base class of the messages between ranks."""


class Beat(_Message):
    """A sign of life."""


class Welcome(_Message):
    """Rank 0's first message to another rank, once all ranks have connected.

    ``rendezvous`` is the address (host:port) at which the ranks' communicators connect. ``config`` is rank 0's config,
    encoded by `encode_config`. ``plugins`` are the SHA-256 values of its plugins' files.
    """

    rendezvous: str
    config: bytes
    plugins: dict[str, str]


class RankReady(_Message):
    """The notice of a rank above 0 that its engine is ready for steps."""


class RankFailed(_Message):
    """The last message of a rank above 0 that ends with an error. ``options``: an option must be changed."""

    text: str
    options: bool = False


class Leaving(_Message):
    """The notice of a rank above 0 that its process was asked to end: rank 0's server then drains."""


class StepFrame(_Message):
    """A step, encoded by `Step.encode`. The ids of the steps of a session are 0, 1, 2, … without gaps."""

    data: bytes


class EndOfSteps(_Message):
    """Rank 0's last message: no step follows."""


Frame: TypeAlias = Beat | Welcome | RankReady | RankFailed | Leaving | StepFrame | EndOfSteps
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Session:
    """One side of an authenticated connection. The two directions have keys and numbers of their own.

    ``send_key`` and ``receive_key`` come from the handshake (`minisgl.cluster.multi_node.handshake`). After a
    `ChannelError`, the session must not be used any more.
    """

    def __init__(self, send_key: bytes, receive_key: bytes, max_body: int = MAX_BODY_BYTES):
        self._send_key, self._receive_key = send_key, receive_key
        self._max_body = max_body
        self._sent = self._received = self._steps = 0
        self._buffer = bytearray()

    def seal(self, message: Frame) -> bytes:
        """Return the frame of ``message``, to be sent after all frames before it. Raise `ChannelError` if too large."""
        body = msgspec.msgpack.encode(message)
        if len(body) > self._max_body:
            raise ChannelError(f"a message of {len(body)} bytes is too large: at most {self._max_body} are allowed")
        header = _HEADER.pack(len(body), self._sent)
        self._sent += 1
        return header + hmac.digest(self._send_key, header + body, "sha256") + body

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._buffer += data

    def next(self) -> Frame | None:
        """Return the next received message, or None if its frame is not complete.

        Raise `ChannelError` for a frame that is too large, forged, not the next one, or no message. The size is checked
        as soon as the header has arrived. The buffer holds only bytes that have arrived.
        """
        buffer = self._buffer
        if len(buffer) < _OVERHEAD:
            return None
        size, number = _HEADER.unpack_from(buffer)
        if size > self._max_body:
            raise ChannelError(f"a frame announces {size} bytes: at most {self._max_body} are allowed")
        if len(buffer) < _OVERHEAD + size:
            return None
        header, tag = buffer[: _HEADER.size], buffer[_HEADER.size : _OVERHEAD]
        body = bytes(buffer[_OVERHEAD : _OVERHEAD + size])
        if not hmac.compare_digest(tag, hmac.digest(self._receive_key, header + body, "sha256")):
            raise ChannelError("a frame is forged or damaged: its tag is wrong")
        if number != self._received:
            raise ChannelError(
                f"frame {number} arrived in place of frame {self._received}: replayed, reordered or lost"
            )
        del buffer[: _OVERHEAD + size]
        self._received += 1
        return self._decoded(body)

    def _decoded(self, body: bytes) -> Frame:
        try:
            message = _decoder.decode(body)
            if isinstance(message, StepFrame):
                self._check_step(step_id(message.data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ChannelError(f"a frame of {len(body)} bytes is no message: {error}") from error
        return message

    def _check_step(self, number: int) -> None:
        if number != self._steps:
            raise ChannelError(f"step {number} arrived in place of step {self._steps}")
        self._steps += 1


class _Head(msgspec.Struct, array_like=True):
    """The first element of an encoded step; the others are skipped."""

    id: int


_head_decoder = msgspec.msgpack.Decoder(_Head)


def step_id(data: bytes) -> int:
    """Return the id of the step that `Step.encode` turned into ``data``, without decoding the rest."""
    return _head_decoder.decode(data).id
