"""Prompts that are too long to be tokenized: their characters show that they have too many tokens.

Tokenizing a very long text would delay all other requests: 1 MiB takes about a second.
"""

from __future__ import annotations

from typing import Any

from minisgl.message import ChatPrompt
from minisgl.sampling_params import too_long

MAX_CHARS_PER_TOKEN = 16
"""The largest number of characters of a text for each token that the server allows for a request."""


def check_num_chars(prompt: str | ChatPrompt, max_tokens: int, max_token_chars: int) -> None:
    """Raise `InvalidRequestError` for a text, or a chat whose strings together, are too long for ``max_tokens``.

    ``max_token_chars`` is the number of characters of the longest token: n characters are at least
    n / max_token_chars tokens. `minisgl.plugins.http.bounds` has refused a chat with too many parts before.
    """
    most = min(max_token_chars, MAX_CHARS_PER_TOKEN) * max_tokens
    if isinstance(prompt, str):
        if len(prompt) > most:
            what = f"The prompt has {len(prompt)} characters, and at most {most} are tokenized; a plain prompt may be "
            raise too_long("prompt", max_tokens, f"{what}sent as token ids.")
        return
    num_chars = 0
    todo: list[Any] = [*prompt.messages, prompt.chat_template_kwargs, prompt.tools]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            num_chars += len(value)
        else:
            todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if num_chars > most:
        raise too_long("messages", max_tokens, f"The messages have {num_chars} characters, more than {most}.")
