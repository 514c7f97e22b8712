"""Typed messages between the processes, and the queues that carry them.

The messages encode and decode themselves (MessagePack); the queues never drop one. What a message means is the
business of the processes in ``minisgl/server``.
"""

from __future__ import annotations

from minisgl.message.messages import (
    Abort,
    Accepted,
    ChatPrompt,
    Count,
    Delta,
    DetokenizeRequest,
    GetStats,
    IdsPrompt,
    Limits,
    Message,
    Opened,
    Outputs,
    Prompt,
    Replies,
    Schedule,
    Stats,
    Stop,
    Submit,
    TextPrompt,
    TextReply,
    TokenLogprob,
    TokensReply,
    decode,
    pack_ids,
    unpack_ids,
)
from minisgl.message.queue import Addresses, Pull, Push

__all__ = [
    "Abort",
    "Accepted",
    "Addresses",
    "ChatPrompt",
    "Count",
    "Delta",
    "DetokenizeRequest",
    "GetStats",
    "IdsPrompt",
    "Limits",
    "Message",
    "Opened",
    "Outputs",
    "Prompt",
    "Pull",
    "Push",
    "Replies",
    "Schedule",
    "Stats",
    "Stop",
    "Submit",
    "TextPrompt",
    "TextReply",
    "TokenLogprob",
    "TokensReply",
    "decode",
    "pack_ids",
    "unpack_ids",
]
