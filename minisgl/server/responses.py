"""Response bodies in the OpenAI API's format: chat completions and plain completions, in full or as stream chunks.

This module knows what the client asked for and the output of its choices. It knows nothing about HTTP or processes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.core import Finished
from minisgl.message import Delta, PromptLogprob, TokenLogprob

_MIN_LOGPROB = -9999.0
"""The smallest log-probability in a response. It replaces minus infinity, which JSON can't represent."""


@dataclass
class Choice:
    """The output of one choice: all of it for a full response, or the part for the next chunk of a stream.

    ``index`` is the choice's position in the response.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[list[PromptLogprob] | None] = field(default_factory=list)
    finish: Finished | None = None
    offset: int = 0  # with logprobs: the number of characters of the tokens in the choice's earlier chunks

    def add(self, delta: Delta) -> None:
        """Append a delta of this choice's request."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish

    def next_chunk(self) -> Choice:
        """Return an empty `Choice` for the same index, which collects the output for the chunk after this one."""
        return Choice(self.index, offset=self.offset + sum(len(token.text) for token in self.logprobs))


class ResponseBuilder:
    """The builder of the response to one HTTP request, in the format of chat completions or of plain completions.

    `full` builds the body of a response that is not streamed. For a streamed response, `first_chunk`, `chunk` and
    `usage_chunk` build the bodies of its events. ``n`` is the number of choices of each prompt. ``logprobs`` and
    ``token_ids`` add these fields to the choices. ``include_usage`` adds the usage to a stream. ``prompt_logprobs``
    adds the prompt's log-probabilities to a response that is not streamed. The response's id ends in ``request_id``.
    """

    def __init__(
        self,
        *,
        chat: bool,
        model: str,
        n: int,
        logprobs: bool,
        token_ids: bool,
        include_usage: bool,
        prompt_logprobs: bool = False,
        request_id: str | None = None,
    ):
        self.chat, self.model, self.n = chat, model, n
        self.logprobs, self.token_ids, self.include_usage = logprobs, token_ids, include_usage
        self.prompt_logprobs = prompt_logprobs
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id or uuid.uuid4().hex}"
        self.created = int(time.time())

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        body = []
        for choice in choices:
            if self.chat:
                content: dict[str, Any] = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            else:
                content = {"text": choice.text}
            if self.prompt_logprobs and not self.chat:  # the first choice of a prompt reports them for all
                first = choices[choice.index - choice.index % self.n]
                content["prompt_logprobs"] = _prompt_logprobs(first)
            body.append({"index": choice.index, **content, **self._common_fields(choice, self.logprobs)})
        kind = "chat.completion" if self.chat else "text_completion"
        response = {**self._head(kind), "choices": body, "usage": self.usage([c.finish for c in choices])}
        if self.prompt_logprobs and self.chat:  # a chat has one prompt
            response["prompt_logprobs"] = _prompt_logprobs(choices[0])
        return response

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice. It has the role of a chat message; a plain completion has none."""
        if not self.chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """Return the chunk with the output of a choice since its last chunk."""
        if self.chat:
            content: dict[str, Any] = {
                "delta": {"content": choice.text} if choice.text or choice.finish is None else {}
            }
        else:
            content = {"text": choice.text}
        return self._chunk({"index": choice.index, **content, **self._common_fields(choice, bool(choice.logprobs))})

    def usage_chunk(self, ends: Sequence[Finished | None]) -> dict[str, Any] | None:
        """Return the last chunk of a stream, which has the usage, or None if the client did not ask for the usage."""
        return {**self._chunk(), "usage": self.usage(ends)} if self.include_usage else None

    def usage(self, ends: Sequence[Finished | None]) -> dict[str, Any]:
        """Return the token counts over all choices. A prompt counts once, although ``n`` choices share it."""
        finished = [end for end in ends if end is not None]
        first_choices = finished[:: self.n]
        prompt_tokens = sum(end.prompt_tokens for end in first_choices)
        output_tokens = sum(end.output_tokens for end in finished)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in first_choices)},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _common_fields(self, choice: Choice, with_logprobs: bool) -> dict[str, Any]:
        """Return the fields of a choice that chat and plain completions share."""
        format_logprobs = _chat_logprobs if self.chat else _completion_logprobs
        fields = {
            "logprobs": format_logprobs(choice) if with_logprobs else None,
            "finish_reason": choice.finish.finish_reason if choice.finish is not None else None,
        }
        return {**fields, "token_ids": choice.tokens} if self.token_ids else fields


def _chat_logprobs(choice: Choice) -> dict[str, Any]:
    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": max(token.logprob, _MIN_LOGPROB), "bytes": list(token.raw)}

    content = [{**entry(t), "top_logprobs": [entry(top) for top in t.top]} for t in choice.logprobs]
    return {"content": content, "refusal": None}


def _completion_logprobs(choice: Choice) -> dict[str, Any]:
    offsets, offset = [], choice.offset
    for token in choice.logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_name(token) for token in choice.logprobs],
        "token_logprobs": [max(token.logprob, _MIN_LOGPROB) for token in choice.logprobs],
        "top_logprobs": [
            {_name(top): max(top.logprob, _MIN_LOGPROB) for top in (*token.top, token)} for token in choice.logprobs
        ],
        "text_offset": offsets,
    }


def _prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None]:
    """Return the prompt's log-probabilities in vLLM's format: for each position, token id → log-probability."""
    return [
        {
            str(p.token): {"logprob": max(p.logprob, _MIN_LOGPROB), "rank": p.rank, "decoded_token": p.text}
            for p in position
        }
        if position is not None
        else None
        for position in choice.prompt_logprobs
    ]


def _name(token: TokenLogprob) -> str:
    """Return a name for a token: its text, or its bytes if they are not complete characters.

    The bytes keep the names of two such tokens different. Their texts, which contain U+FFFD, could be the same.
    """
    if "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
