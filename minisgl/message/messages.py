"""What the processes say to each other: one struct for each kind of message, all in one tagged union.

A request's way is Submit (API server → tokenizer), Schedule (→ scheduler), Outputs (→ detokenizer), Replies (→ API
server). Each message carries uids, which the API server makes; token ids travel as int32 arrays, a step at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from minisgl.core import I32, Finished, Output, SamplingParams


def pack_ids(ids: Sequence[int] | I32) -> bytes:
    """Token ids as little-endian int32 bytes. Raises OverflowError for one that does not fit."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> I32:
    """The inverse of `pack_ids`: an int32 array of its own."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


class Message(msgspec.Struct, tag=True, array_like=True):
    """The base of every message."""

    def encode(self) -> bytes:
        """The message as bytes (MessagePack); `decode` is the inverse."""
        return msgspec.msgpack.encode(self)


# ---- API server → tokenizer ----------------------------------------------------------------------


class TextPrompt(msgspec.Struct, tag="text"):
    """A plain text. ``special`` lets the tokenizer add its own special tokens (BOS)."""

    text: str
    special: bool = True


class IdsPrompt(msgspec.Struct, tag="ids"):
    """Token ids, as `pack_ids` makes them."""

    ids: bytes


class ChatPrompt(msgspec.Struct, tag="chat"):
    """Turns of a conversation for the model's chat template; ``extra`` are further variables for it."""

    turns: list[dict[str, Any]]
    generate: bool = True  # end with the opening of the assistant's turn
    extra: dict[str, Any] = {}


Prompt: TypeAlias = TextPrompt | IdsPrompt | ChatPrompt


class Submit(Message):
    """A new prompt and the requests (one for each of its ``n`` choices) that start from it.

    ``fill``: nobody gave ``max_tokens``; what the context has left is meant.
    """

    uids: list[int]
    prompt: Prompt
    params: SamplingParams
    max_tokens_from_context: bool = False


class Abort(Message):
    """Nobody waits for these requests any more. Goes the way that their Submit went, so it never overtakes it."""

    uids: list[int]


class Limits(Message):
    """What the engine can hold: tokens in a request, prompt and output together, and token ids."""

    max_len: int
    vocab_size: int


class Count(Message):
    """Tokenize, and reply with `TokensReply`; ``strings`` asks for each token's text too."""

    uid: int
    prompt: Prompt
    strings: bool = False


class DetokenizeRequest(Message):
    """Turn ids (as `pack_ids` makes them) into text, and reply with `TextReply`."""

    uid: int
    ids: bytes


# ---- → scheduler -----------------------------------------------------------------------------------


class Schedule(Message):
    """A request ready for the scheduler; ``prompt`` as `pack_ids` makes it."""

    uid: int
    prompt: bytes
    params: SamplingParams


class GetStats(Message):
    """Ask for the scheduler's counts; it replies with `Stats`, between two steps."""

    uid: int


class Stop(Message):
    """Close what you hold and end."""


# ---- scheduler → detokenizer ---------------------------------------------------------------------------


class Opened(msgspec.Struct, array_like=True):
    """A request that the scheduler accepted: what its detokenizer must know. ``tail`` is the prompt's last ids."""

    uid: int
    tail: list[int]
    params: SamplingParams


class Outputs(Message):
    """What one step of the scheduler brought; ``opened`` requests are new."""

    opened: list[Opened]
    output: Output


# ---- → API server ------------------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token with its log-probability, and the most likely ones in its place, best first."""

    text: str
    raw: bytes
    logprob: float
    top: list[TokenLogprob] = []


class Delta(msgspec.Struct, array_like=True):
    """What one request gained: text that is safe to show, the tokens behind it, and (once, last) its end.

    ``stopped`` is the stop string that was found; whoever drives the scheduler then aborts the request there, and
    the ``finish`` follows.
    """

    uid: int
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: Finished | None = None
    stopped: str | None = None


class Accepted(Message):
    """These requests passed every check and wait for their turn."""

    uids: list[int]


class Replies(Message):
    """What requests gained, from one step."""

    deltas: list[Delta]


class TokensReply(Message):
    """The answer to `Count`; ``error`` as in `Finished`, with its field and status, where it can't be done."""

    uid: int
    ids: bytes = b""
    strings: list[str] | None = None
    error: Finished | None = None


class TextReply(Message):
    """The answer to `DetokenizeRequest`."""

    uid: int
    text: str = ""
    error: Finished | None = None


class Stats(Message):
    """The answer to `GetStats`: counts by name, and what observers add in Prometheus' text format."""

    uid: int
    values: dict[str, float]
    text: str = ""


AnyMessage: TypeAlias = (
    Submit
    | Abort
    | Limits
    | Count
    | DetokenizeRequest
    | Schedule
    | GetStats
    | Stop
    | Outputs
    | Accepted
    | Replies
    | TokensReply
    | TextReply
    | Stats
)
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def decode(data: bytes) -> AnyMessage:
    """The message that `Message.encode` made these bytes of. Raises msgspec.ValidationError for others."""
    return _decoder.decode(data)
