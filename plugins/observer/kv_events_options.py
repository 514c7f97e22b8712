"""The options of the observer ``kv_events``: `KVEventsConfig`, the section ``kv_events``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from minisgl.config import checker

_ADDRESS = re.compile(r"tcp://[^\s/;]+:(?P<port>\*|[0-9]{1,5})|ipc:///[^\s]+")


@dataclass
class KVEventsConfig:
    """Options of KV events: messages over ZeroMQ that say which KV pages the prefix cache stores and removes."""

    endpoint: str | None = None
    """The address to publish at, such as ``tcp://127.0.0.1:5557``, or ``tcp://*:5557`` for all addresses of the
    machine. The port ``*`` is any free port, which is logged. The messages contain token ids of prompts and answers.
    Default: nothing is published."""
    replay_endpoint: str | None = None
    """The address at which a subscriber can ask for messages that it missed. Default: they can't be had."""
    buffer_steps: int = 10_000
    """Number of past messages that ``kv_events.replay_endpoint`` keeps. It keeps fewer if they exceed 256 MiB."""
    hwm: int = 100_000
    """Number of messages that wait for a slow subscriber, before further ones are dropped for it. 0: no limit."""
    topic: str = ""
    """The topic of the messages, their first frame. A subscriber may subscribe to the topics with a given beginning."""
    hash_seed: int = 0
    """Seed of the block hashes. Servers with the same seed and page size publish the same hash for the same tokens."""

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range."""
        need = checker(self, "kv_events.")
        for key in ("endpoint", "replay_endpoint"):
            address = getattr(self, key)
            match = _ADDRESS.fullmatch("tcp://*:0" if address is None else address)
            address_ok = match is not None and (match["port"] in (None, "*") or int(match["port"]) <= 65535)
            need(address_ok, key, "an address such as tcp://127.0.0.1:5557 or ipc:///run/kv, or null")
        need(
            self.replay_endpoint is None or self.endpoint is not None, "replay_endpoint", "used with kv_events.endpoint"
        )
        need(self.buffer_steps >= 1, "buffer_steps", "at least 1")
        need(0 <= self.hwm < 2**31, "hwm", "at least 0, and below 2^31")
        need(-(2**63) <= self.hash_seed < 2**63, "hash_seed", "a 64-bit integer")
