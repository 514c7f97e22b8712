"""Bounds of the work of one HTTP request: the number of its choices, and of the parts of its chat.

The tokenizers check the size of a chat again (`minisgl.server.protocol`), because they can't know whether its
messages were checked. Here the check saves the API server the work on each message.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minisgl import hookimpl
from minisgl.config import Config, ServerConfig
from minisgl.core import InvalidRequestError, SamplingParams
from minisgl.message import Prompt
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.protocol import check_chat_size
from minisgl.server.request_record import RequestRecord

MAX_N = 128
"""The largest ``n``."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Bounds(config.server)


class Bounds(HttpExtension):
    """Refuses requests with more choices than ``server.max_choices``, and chats with more parts than tokens."""

    options = ("max_choices",)

    def __init__(self, server: ServerConfig):
        most = server.max_choices
        self._max_choices = default_choices(server.max_queued) if most is None else most

    def admit(self, prompts: Sequence[Prompt], params: SamplingParams, record: RequestRecord) -> None:
        if len(prompts) * params.n > self._max_choices:
            raise ApiError(
                400,
                f"The request asks for {len(prompts) * params.n} choices: n={params.n} for each of {len(prompts)} "
                f"prompts. A request may have at most {self._max_choices} (server.max_choices): send several requests.",
                "prompt" if len(prompts) > 1 else "n",
                "invalid_value",
            )

    def check_body(self, body: msgspec.Struct, max_seq_len: int) -> None:
        messages = getattr(body, "messages", None)
        if messages is None:
            return
        try:
            check_chat_size(messages, getattr(body, "chat_template_kwargs", {}), max_seq_len)
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from None


def default_choices(max_open: int) -> int:
    """Return the default of ``server.max_choices``: a quarter of the open requests, but not less than the largest n."""
    return min(max_open, max(MAX_N, max_open // 4))
