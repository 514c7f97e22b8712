"""The messages between the processes of a server: one struct for each kind of message, all in one tagged union.

`minisgl.message.queue` has the queues that carry them, and the processes in ``minisgl/server`` decide what to do with
each message.

A request passes through four messages: Submit (API server → tokenizer), Schedule (tokenizer → scheduler), Outputs
(scheduler → detokenizer) and Replies (detokenizer → API server). The API server gives every request its ``uid``, and
the messages refer to a request by it. A prompt's token ids travel as int32 bytes (`pack_ids`). `Outputs` and `Replies`
carry the tokens of all requests of one scheduler step in one message.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from minisgl.core import I32, Finished, Output, SamplingParams


def pack_ids(ids: Sequence[int] | I32) -> bytes:
    """Return token ids as little-endian int32 bytes. Raise OverflowError for an id that does not fit into int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def num_ids(packed: bytes) -> int:
    """Return the number of token ids in bytes of `pack_ids`."""
    return len(packed) // 4


def unpack_ids(data: bytes) -> I32:
    """Return the token ids in ``data`` as a new, writable int32 array: the inverse of `pack_ids`."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


_function_at = cache(pkgutil.resolve_name)  # takes 16 µs each time


class Message(msgspec.Struct, tag=True, array_like=True):
    """The base class of every message. Its subclasses form one tagged union, which `decode` reads."""

    def encode(self) -> bytes:
        """Return the message as MessagePack bytes. `decode` is the inverse."""
        return msgspec.msgpack.encode(self)


# ---- API server → tokenizer ----------------------------------------------------------------------


class TextPrompt(msgspec.Struct, tag="text"):
    """A prompt given as plain text. ``add_special_tokens`` lets the tokenizer add its special tokens (BOS).

    Only the last ``num_kept_tokens`` tokens are kept; 0 keeps all.
    """

    text: str
    add_special_tokens: bool = True
    num_kept_tokens: int = 0


class TokensPrompt(msgspec.Struct, tag="tokens"):
    """A prompt given as token ids. ``ids`` are bytes, packed by `pack_ids`."""

    ids: bytes


class ChatPrompt(msgspec.Struct, tag="chat"):
    """A prompt given as chat messages, which the tokenizer process renders with the model's chat template.

    ``messages`` are dictionaries with ``role`` and ``content``, as in the OpenAI API. ``add_generation_prompt`` ends
    the rendered text with the beginning of an assistant message. ``chat_template_kwargs`` are further template
    variables. ``tools`` are the tools of which the template tells the model, in the OpenAI API's form.
    ``num_kept_tokens`` is that of `TextPrompt`. ``optional_kwargs`` are template variables for a template that
    reads them. With ``continue_final_message``, the text ends with the content of the last message.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    num_kept_tokens: int = 0
    optional_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False


Prompt: TypeAlias = TextPrompt | TokensPrompt | ChatPrompt


class Submit(Message):
    """A new prompt, to be tokenized and scheduled. ``uids`` has a number for each of the prompt's ``n`` choices.

    ``max_tokens_from_context`` is true where the client set no ``max_tokens``: the tokenizer then lowers ``max_tokens``
    to the number of tokens that the context has left after the prompt. ``request_id`` names the HTTP request in logs.
    ``group`` is the same number for all choices of one HTTP request, or 0 if it has only one.
    """

    uids: list[int]
    prompt: Prompt
    params: SamplingParams
    max_tokens_from_context: bool = False
    request_id: str = ""
    group: int = 0


class Abort(Message):
    """An instruction to abort these requests: the client has gone, or the detokenizer found a stop string.

    The API server sends `Abort` to the tokenizer that got the requests' `Submit`, and the tokenizer passes it on to the
    scheduler. So an `Abort` never overtakes the `Submit` of its requests. The detokenizer sends its `Abort` to the
    scheduler directly.
    """

    uids: list[int]


class Limits(Message):
    """The engine's limits, sent to every tokenizer before the first request.

    ``max_seq_len`` is the largest number of tokens of a request, prompt and output together. ``vocab_size`` is the
    number of token ids.
    """

    max_seq_len: int
    vocab_size: int


# ---- → scheduler -----------------------------------------------------------------------------------


class Schedule(Message):
    """A tokenized prompt for the scheduler. ``uids`` has a number for each of the prompt's ``n`` choices.

    ``prompt_ids`` are the prompt's token ids, packed by `pack_ids`. They are sent once, and the choices share them.
    ``params`` are the first choice's: see `SamplingParams.of_choice`. ``group`` is that of `Submit`.
    """

    uids: list[int]
    prompt_ids: bytes
    params: SamplingParams
    group: int = 0


class Call(Message):
    """An instruction of a plugin to another process of the server: call a function, between two other messages.

    ``function`` is its place, such as ``package.module:name``. Its arguments are the process's `TextWorker`,
    `SchedulerLoop` or `Dispatcher`, and then ``arguments``. An error of the function ends the process.
    """

    function: str
    arguments: list[Any] = []

    def run(self, process: object) -> None:
        _function_at(self.function)(process, *self.arguments)


class Stop(Message):
    """An instruction to a process to release its resources and exit."""


# ---- scheduler → detokenizer ---------------------------------------------------------------------------


class NewRequest(msgspec.Struct, array_like=True):
    """A request that the scheduler has just accepted, described for the detokenizer.

    ``prompt_tail`` are the prompt's last token ids, at most `minisgl.tokenizer.detokenizer.PROMPT_TAIL_TOKENS`, or all
    of them if the request asks for the prompt's log-probabilities. ``prompt_tokens`` is the length of the prompt.
    """

    uid: int
    prompt_tail: list[int]
    params: SamplingParams
    prompt_tokens: int = 0


class Outputs(Message):
    """The output of one scheduler step, and the requests that the scheduler has accepted since the step before."""

    new_requests: list[NewRequest]
    output: Output


# ---- → API server ------------------------------------------------------------------------------------


class Delta(msgspec.Struct, array_like=True):
    """The new output of one request: text that the client may see, and the token ids that were added.

    The text may lag behind the tokens, where it is held back because a stop string may have begun. The last delta of a
    request, and only that one, has ``finish``. ``matched_stop`` is the stop string that the detokenizer found. Where
    such a delta has no ``finish``, the caller of the detokenizer aborts the request at the scheduler; the scheduler's
    output for the aborted request then leads to the delta with ``finish``.

    ``logprobs`` and ``prompt_logprobs`` are those of `minisgl.plugins.http.apis.logprobs`, if the request asks for
    them: an entry for each token, and for each of the prompt's next positions, None where it has none.
    """

    uid: int
    text: str = ""
    tokens: list[int] = []
    logprobs: list[Any] = []
    finish: Finished | None = None
    matched_stop: str | None = None
    prompt_logprobs: list[Any] = []


class Accepted(Message):
    """A notice that the scheduler accepted these requests: they passed every check and are waiting requests now.

    ``prompt_tokens`` are the numbers of tokens of their prompts.
    """

    uids: list[int]
    prompt_tokens: list[int]


class Replies(Message):
    """The deltas of all requests that one scheduler step changed, or the last deltas of refused requests."""

    deltas: list[Delta]


AnyMessage: TypeAlias = Submit | Abort | Limits | Schedule | Call | Stop | Outputs | Accepted | Replies
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def decode(data: bytes) -> AnyMessage:
    """Return the message that `Message.encode` encoded. Raise msgspec.ValidationError for any other bytes."""
    return _decoder.decode(data)
