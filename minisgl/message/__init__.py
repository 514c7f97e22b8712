"""Typed messages between the processes, and the queues that carry them.

The messages encode and decode themselves (MessagePack). The queues have no bound. The processes in
``minisgl/server`` decide what to do with each message.
"""

from __future__ import annotations

from minisgl.message.messages import (
    Abort,
    Accepted,
    ChatPrompt,
    Delta,
    DetokenizeReply,
    DetokenizeRequest,
    GetStats,
    Limits,
    Message,
    NewRequest,
    Outputs,
    Ping,
    Pong,
    Prompt,
    PromptLogprob,
    Replies,
    Schedule,
    Stats,
    Stop,
    Submit,
    TextPrompt,
    TokenizeReply,
    TokenizeRequest,
    TokenLogprob,
    TokensPrompt,
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
    "Delta",
    "DetokenizeReply",
    "DetokenizeRequest",
    "GetStats",
    "Limits",
    "Message",
    "NewRequest",
    "Outputs",
    "Ping",
    "Pong",
    "Prompt",
    "PromptLogprob",
    "Pull",
    "Push",
    "Replies",
    "Schedule",
    "Stats",
    "Stop",
    "Submit",
    "TextPrompt",
    "TokenLogprob",
    "TokenizeReply",
    "TokenizeRequest",
    "TokensPrompt",
    "decode",
    "pack_ids",
    "unpack_ids",
]
