"""How the answer to a chat is shown in full: its parts, its tokens and their log-probabilities, as the OpenAI API does.

A `ReadForm` has the reader of the answer's parts (`minisgl.plugins.http.apis.answer`). Without it, all text is content.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.core import Finished
from minisgl.message import Delta
from minisgl.plugins.http.apis.answer import (
    AnswerReader,
    CallArguments,
    CallBegin,
    Content,
    Part,
    PlainReader,
    Reasoning,
)
from minisgl.plugins.http.apis.logprobs import PromptLogprob, TokenLogprob
from minisgl.plugins.http.apis.names import NO_NAMES, renamed
from minisgl.server.errors import ApiError
from minisgl.server.generate import Choice, ResponseBuilder, usage_of
from minisgl.server.protocol import AnswerForm

MAX_SILENCE = 0.05
"""Seconds after which tokens without text are sent as a chunk with an empty text, so that a client sees that the server
computes its request. Special tokens have no text, and the beginning of a stop string is held back."""
MIN_LOGPROB = -9999.0
"""The smallest log-probability in a response. It replaces minus infinity, which JSON can't represent."""


class ReadForm(AnswerForm):
    """The form of a chat whose answer has a reader. This one reads all text as content."""

    def reader(self) -> AnswerReader:
        """Return a new reader, for one choice."""
        return PlainReader()


@dataclass
class FullChoice(Choice):
    """The output of one choice, with its parts and log-probabilities.

    ``parts`` are the text as ``reader`` reads it. ``has_calls`` is true once the output has had a tool call. A token
    whose text comes with a later token's is reasoning if that one is. ``with_ids``: the client sees each token's id.
    ``matched_stop`` is the stop string that cut the output. ``since`` is the time of the choice's last chunk.
    """

    reader: AnswerReader = field(default_factory=PlainReader)
    with_ids: bool = False
    parts: list[Part] = field(default_factory=list)
    has_calls: bool = False
    reasoning_tokens: int = 0
    matched_stop: str | None = None
    since: float = field(default_factory=lambda: time.monotonic())
    num_unread: int = 0  # the number of tokens whose text has not come
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[list[PromptLogprob] | None] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        super().add(delta)
        self.matched_stop = delta.matched_stop or self.matched_stop
        parts = self.reader.feed(delta.text) + (self.reader.finish() if delta.finish is not None else [])
        self.parts += parts
        self.num_unread += len(delta.tokens)
        if parts:
            self.reasoning_tokens += self.num_unread if isinstance(parts[-1], Reasoning) else 0
            self.num_unread = 0
        self.has_calls = self.has_calls or any(isinstance(part, CallBegin) for part in parts)
        if delta.logprobs:
            self.logprobs += msgspec.convert(delta.logprobs, list[TokenLogprob])
        if delta.prompt_logprobs:
            self.prompt_logprobs += msgspec.convert(delta.prompt_logprobs, list[list[PromptLogprob] | None])

    @property
    def is_due(self) -> bool:
        if self.parts or self.logprobs or self.finish or (self.with_ids and self.tokens):
            return True
        return bool(self.tokens) and time.monotonic() - self.since > MAX_SILENCE

    def next_chunk(self) -> FullChoice:
        return FullChoice(
            self.index,
            matched_stop=self.matched_stop,
            reader=self.reader,
            with_ids=self.with_ids,
            has_calls=self.has_calls,
            num_unread=self.num_unread,
        )

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, in the words of a chat: an answer with tool calls that is complete has "tool_calls"."""
        if self.finish is None:  # for each chunk but the last
            return None
        return "tool_calls" if self.has_calls and self.finish.finish_reason == "stop" else self.finish.finish_reason


class FullBuilder(ResponseBuilder):
    """The builder of the response to a chat with all parameters. ``names`` are those of `renamed`.

    ``logprobs`` and ``token_ids`` add these fields to the choices. ``include_usage`` adds the usage to a stream, and
    with it ``continuous_usage`` the usage so far to each chunk, as in vLLM. ``prompt_logprobs`` adds the prompt's
    log-probabilities to a response that is not streamed.
    """

    def __init__(
        self,
        *,
        logprobs: bool = False,
        token_ids: bool = False,
        names: Mapping[str, str] = NO_NAMES,
        include_usage: bool = False,
        continuous_usage: bool = False,
        prompt_logprobs: bool = False,
        **options: Any,
    ):
        super().__init__(**options)
        self.logprobs, self.token_ids, self.prompt_logprobs = logprobs, token_ids, prompt_logprobs
        self.names = names
        self.include_usage, self.continuous_usage = include_usage, include_usage and continuous_usage
        self.reasoning_tokens = 0  # of all choices, in the chunks so far
        self._output_tokens = 0  # likewise
        self._is_full = False

    def api_error(self, end: Finished) -> ApiError:
        return renamed(super().api_error(end), self.names)

    def new_choice(self, index: int) -> FullChoice:
        reader = self.form.reader() if isinstance(self.form, ReadForm) else PlainReader()
        return FullChoice(index, reader=reader, with_ids=self.token_ids)

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        self._is_full = True
        self.reasoning_tokens = sum(full_choice(choice).reasoning_tokens for choice in choices)
        response = super().full(choices)
        if self.prompt_logprobs:  # a chat has one prompt
            response["prompt_logprobs"] = vllm_prompt_logprobs(choices[0])
        return response

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "refusal": None, **message(full_choice(choice).parts)}}

    def chunk(self, choice: Choice) -> dict[str, Any]:
        self.reasoning_tokens += full_choice(choice).reasoning_tokens
        self._output_tokens += len(choice.tokens)
        return super().chunk(choice)

    def delta(self, choice: Choice) -> dict[str, Any]:
        delta = message_delta(full_choice(choice).parts)
        return {"delta": {"content": ""} if not delta and choice.finish is None else delta}

    def end(self, ends: Sequence[Finished | None]) -> bytes:
        usage = {**self._chunk(), "usage": self.usage(ends)} if self.include_usage else None
        return self.encode([usage]) + super().end(ends)

    def usage(self, ends: Sequence[Finished | None]) -> dict[str, Any]:
        return {**super().usage(ends), "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = super()._chunk(*choices)
        if self.include_usage:
            chunk["usage"] = None
        if self.continuous_usage and choices and self.stream is not None:  # the cached tokens are not known yet
            chunk["usage"] = usage_of(sum(self.stream.num_prompt_tokens[:: self.n]), self._output_tokens)
        return chunk

    def _common_fields(self, choice: Choice) -> dict[str, Any]:
        fields = super()._common_fields(choice)
        if full_choice(choice).logprobs or (self.logprobs and self._is_full):
            fields["logprobs"] = self.format_logprobs(choice)
        if choice.finish is not None and (stop := full_choice(choice).matched_stop) is not None:
            fields["stop_reason"] = stop  # vLLM's field
        return {**fields, "token_ids": choice.tokens} if self.token_ids else fields

    def format_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the log-probabilities of a choice's tokens."""

        def entry(token: TokenLogprob) -> dict[str, Any]:
            return {"token": token.text, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": list(token.raw)}

        content = [{**entry(t), "top_logprobs": [entry(top) for top in t.top]} for t in full_choice(choice).logprobs]
        return {"content": content, "refusal": None}


def vllm_prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None]:
    """Return the prompt's log-probabilities in vLLM's format: for each position, token id → log-probability."""
    return [
        {
            str(p.token): {"logprob": max(p.logprob, MIN_LOGPROB), "rank": p.rank, "decoded_token": p.text}
            for p in position
        }
        if position is not None
        else None
        for position in full_choice(choice).prompt_logprobs
    ]


def full_choice(choice: Choice) -> FullChoice:
    """Return a choice of `FullBuilder.new_choice` with its type."""
    assert isinstance(choice, FullChoice)
    return choice


# ---- in the form of the OpenAI API -----------------------------------------------------------------------


def message_delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Return parts of an answer as the change of a chat's message: only the fields that the parts have.

    Reasoning is in ``reasoning``, as in vLLM, and in ``reasoning_content``, as in the API of DeepSeek.
    """
    found: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                found["content"] = found.get("content", "") + text
            case Reasoning(text):
                found["reasoning_content"] = found["reasoning"] = found.get("reasoning", "") + text
            case CallBegin(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return {**found, "tool_calls": list(calls.values())} if calls else found


def message(parts: Sequence[Part]) -> dict[str, Any]:
    """Return a whole answer as the fields of a chat's message. Its content is null if there are only tool calls."""
    found = message_delta(parts)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in found.pop("tool_calls", [])]
    return {"content": None if calls else "", **found, **({"tool_calls": calls} if calls else {})}
