"""Log-probabilities in the formats of chats, plain completions and vLLM's ``prompt_logprobs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl.message import PromptLogprob, TokenLogprob

if TYPE_CHECKING:
    from minisgl.server.generate import Choice

MIN_LOGPROB = -9999.0
"""The smallest log-probability in a response. It replaces minus infinity, which JSON can't represent."""


def chat_logprobs(choice: Choice) -> dict[str, Any]:
    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": list(token.raw)}

    content = [{**entry(t), "top_logprobs": [entry(top) for top in t.top]} for t in choice.logprobs]
    return {"content": content, "refusal": None}


def completion_logprobs(choice: Choice) -> dict[str, Any]:
    offsets, offset = [], choice.offset
    for token in choice.logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [name_of(token) for token in choice.logprobs],
        "token_logprobs": [max(token.logprob, MIN_LOGPROB) for token in choice.logprobs],
        "top_logprobs": [
            {name_of(top): max(top.logprob, MIN_LOGPROB) for top in (*token.top, token)} for token in choice.logprobs
        ],
        "text_offset": offsets,
    }


def vllm_prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None]:
    """Return the prompt's log-probabilities in vLLM's format: for each position, token id → log-probability."""
    return [
        {
            str(p.token): {"logprob": max(p.logprob, MIN_LOGPROB), "rank": p.rank, "decoded_token": p.text}
            for p in position
        }
        if position is not None
        else None
        for position in choice.prompt_logprobs
    ]


def name_of(token: TokenLogprob | PromptLogprob) -> str:
    """Return a name for a token: its text, or its bytes if they are not complete characters.

    The bytes keep the names of two such tokens different. Their texts, which contain U+FFFD, could be the same.
    """
    if "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
