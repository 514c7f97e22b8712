"""Bounds of what a tokenizer process is asked to do: the parts of a chat, and the number of token ids.

A text is bounded by its length (`minisgl.server.text_process`), but a chat of 36,000 empty messages has almost no text,
and rendering it takes a second of the tokenizer's time. So the parts of a chat are counted first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.sampling_params import too_long

VALUES_PER_TOKEN = 4
"""The largest number of JSON values inside the fields of all messages, for each token that the server allows."""


def check_chat_size(
    messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], max_seq_len: int, max_chars: int | None = None
) -> None:
    """Raise `InvalidRequestError` for a chat that is too large to be rendered.

    Each message costs at least a token, so there are at most ``max_seq_len`` messages. Content parts, tool calls and
    template variables have at most `VALUES_PER_TOKEN` JSON values a token, and all strings ``max_chars`` characters.
    """
    if len(messages) > max_seq_len:
        raise too_long(
            "messages", max_seq_len, f"The chat has {len(messages)} messages, and each costs at least a token."
        )
    num_chars, left = 0, VALUES_PER_TOKEN * max_seq_len
    todo: list[Any] = [value for message in messages for value in message.values()]
    todo += kwargs.values()
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            num_chars += len(value)
            continue
        children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        left -= len(children)
        if left < 0:
            values = f"The chat has more than {VALUES_PER_TOKEN * max_seq_len} values in content parts, tools, calls"
            raise too_long("messages", max_seq_len, f"{values} and chat_template_kwargs.")
        todo += children
    if max_chars is not None and num_chars > max_chars:
        raise too_long("messages", max_seq_len, f"The messages have {num_chars} characters, more than {max_chars}.")


def check_num_ids(num_ids: int, max_seq_len: int) -> None:
    """Raise `InvalidRequestError` for more token ids than a request can have: their text is not asked for either."""
    if num_ids > max_seq_len:
        raise too_long("tokens", max_seq_len, f"There are {num_ids} token ids.")
