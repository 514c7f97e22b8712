"""Answers in the OpenAI API's shapes, whole or in chunks: chat completions and plain ones.

Knows what a request asked for and what its choices gained, and nothing of HTTP or processes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.core import Finished
from minisgl.message import Delta, TokenLogprob

_LEAST = -9999.0
"""What a log-probability of minus infinity is written as: JSON has no such number."""


@dataclass
class Choice:
    """What one choice has gained so far, or since the last chunk."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finished | None = None
    offset: int = 0  # characters of tokens before these

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish = delta.finish

    def next(self) -> Choice:
        """An empty one, to gather what comes after this one."""
        return Choice(self.index, offset=self.offset + sum(len(token.text) for token in self.logprobs))


class Answer:
    """The answer to one HTTP request: ``whole`` of all choices, or ``chunk`` by chunk. A chat's, where ``chat``."""

    def __init__(self, *, chat: bool, model: str, n: int, logprobs: bool, token_ids: bool, include_usage: bool):
        self.chat, self.model, self.n = chat, model, n
        self.logprobs, self.token_ids, self.include_usage = logprobs, token_ids, include_usage
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        body = []
        for choice in choices:
            if self.chat:
                content: dict[str, Any] = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            else:
                content = {"text": choice.text}
            body.append({"index": choice.index, **content, **self._rest(choice, self.logprobs)})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": body, "usage": self.usage([c.finish for c in choices])}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that a choice begins with: in a chat, whose turn it is."""
        if not self.chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """What a choice gained since its last chunk, and maybe its end."""
        if self.chat:
            content: dict[str, Any] = {
                "delta": {"content": choice.text} if choice.text or choice.finish is None else {}
            }
        else:
            content = {"text": choice.text}
        return self._chunk({"index": choice.index, **content, **self._rest(choice, bool(choice.logprobs))})

    def closing(self, ends: Sequence[Finished | None]) -> dict[str, Any] | None:
        """The last chunk, where usage was asked for."""
        return {**self._chunk(), "usage": self.usage(ends)} if self.include_usage else None

    def usage(self, ends: Sequence[Finished | None]) -> dict[str, Any]:
        """Token counts. The ``n`` choices of a prompt have it in common: it counts once."""
        done = [end for end in ends if end is not None]
        first = done[:: self.n]
        prompt, output = sum(end.prompt_tokens for end in first), sum(end.output_tokens for end in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in first)},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _rest(self, choice: Choice, with_logprobs: bool) -> dict[str, Any]:
        shape = _chat_logprobs if self.chat else _completion_logprobs
        rest = {
            "logprobs": shape(choice) if with_logprobs else None,
            "finish_reason": choice.finish.finish_reason if choice.finish is not None else None,
        }
        return {**rest, "token_ids": choice.tokens} if self.token_ids else rest


def _chat_logprobs(choice: Choice) -> dict[str, Any]:
    def shape(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": max(token.logprob, _LEAST), "bytes": list(token.raw)}

    content = [{**shape(t), "top_logprobs": [shape(top) for top in t.top]} for t in choice.logprobs]
    return {"content": content, "refusal": None}


def _completion_logprobs(choice: Choice) -> dict[str, Any]:
    offsets, offset = [], choice.offset
    for token in choice.logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_name(token) for token in choice.logprobs],
        "token_logprobs": [max(token.logprob, _LEAST) for token in choice.logprobs],
        "top_logprobs": [
            {_name(top): max(top.logprob, _LEAST) for top in (*token.top, token)} for token in choice.logprobs
        ],
        "text_offset": offsets,
    }


def _name(token: TokenLogprob) -> str:
    """A token as a name: where its bytes are not whole characters, the bytes, or else two tokens would share one."""
    if "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
