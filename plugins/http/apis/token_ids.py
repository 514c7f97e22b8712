"""Prompts that a client gives as token ids: the extensions ``completions`` and ``tokenize`` read them."""

from __future__ import annotations

from minisgl.message import TokensPrompt, pack_ids
from minisgl.server.errors import ApiError


def tokens_prompt(tokens: list[int], param: str) -> TokensPrompt:
    """Return token ids as a prompt. Raise `ApiError` for an id that no vocabulary has: negative, or 2**31 or more.

    ``param`` is the name of the parameter with the ids, for the error.
    """
    try:
        if min(tokens, default=0) >= 0:
            return TokensPrompt(pack_ids(tokens))
    except OverflowError:
        pass
    bad = next(token for token in tokens if not 0 <= token < 2**31)
    raise ApiError(400, f"Token id {bad} is not in the vocabulary.", param, "invalid_value")
