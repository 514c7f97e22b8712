"""Every top-level option of minisgl, with its unit and its default. Plain dataclasses: Hydra stays at the edge.

A group's object (``attention``, ``cache``, …) is an instance of the dataclass that a plugin registered for it;
the core hands it to the plugin's factory and looks at nothing in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

GROUPS = ("attention", "cache", "scheduler", "moe", "graph", "communicator")
LOADS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


class ConfigError(ValueError):
    """Something in the options, or in what they point to, that a person has to change. The message says what was
    given, what was wrong and what to do; the command line prints it and exits with status 2."""


@dataclass
class ServerConfig:
    """The HTTP server and its processes."""

    host: str = "127.0.0.1"
    """The address to listen on; ``0.0.0.0``: every one of this machine."""
    port: int = 1919
    """0 picks a free port and prints it."""
    tokenizers: int = 1
    """Tokenizer processes; 0 lets the detokenizer's process tokenize too."""
    api_key: str | None = None
    """Where set, a request needs ``Authorization: Bearer <api_key>``."""
    served_model_name: str | None = None
    """The model's name in the API; the ``model`` option's by default."""
    max_queued: int = 4096
    """Open requests beyond which a new one gets 503."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    watchdog: float = 300.0
    """Seconds after which a process that is stuck in one step, or in one message, counts as dead, and the server ends;
    0: never."""
    log_level: str = "warning"
    """``critical``, ``error``, ``warning``, ``info``, ``debug`` or ``trace``."""


@dataclass
class Config:
    """minisgl's options."""

    model: str = "tutor"
    """A model that ships with minisgl, a directory, or a Hugging Face id."""
    load: str = "auto"
    """``auto`` reads safetensors; ``dummy`` fills the shapes of config.json with random weights."""
    architecture: str | None = None
    """The model class that computes it, by the name its plugin gives it; by default the one that config.json names."""
    knock_out: str | None = None
    """An expert that contributes nothing, to see what it was for: ``3`` in every layer, ``5:3`` in layer 5 alone."""
    dtype: str = "auto"
    """``float32``, ``bfloat16``, ``float16``; ``auto``: float32 on a CPU, the checkpoint's on a GPU."""
    device: str = "auto"
    """``cpu``, ``cuda``; ``auto``: cuda where there is one."""
    tp: int = 1
    """Tensor-parallel ranks, one process each."""
    seed: int = 0
    """From which requests without a seed of their own, and dummy weights, are drawn."""
    page_size: int = 16
    """Tokens a KV page holds."""
    num_pages: int | None = None
    """Pages in the KV pool; by default what ``memory_ratio`` leaves room for."""
    memory_ratio: float = 0.9
    """Share of the device's memory for weights and KV together (on a CPU: 0.1 of it for KV, 4 GiB at most)."""
    max_running_requests: int = 256
    """Slots: requests that hold KV at the same time."""
    max_seq_len: int | None = None
    """Tokens a request may have, prompt and output together; by default the model's."""
    max_prefill_tokens: int = 8192
    """Prompt tokens computed in one step: longer prompts are cut into chunks. ``mixed`` counts decode rows too."""
    overlap: bool = True
    """Prepare the next step on the host while the device computes this one."""
    starvation_steps: int = 512
    """A request that a policy left out for so many steps is put into the next plan by the scheduler itself."""
    trace: str = ""
    """The file to which every scheduling event is written, as JSON lines; empty: none."""
    plugins: list[str] = field(default_factory=list)
    """Python files or module names with plugins of your own."""

    server: ServerConfig = field(default_factory=ServerConfig)

    attention: Any = None
    cache: Any = None
    scheduler: Any = None
    moe: Any = None
    graph: Any = None
    communicator: Any = None

    def check(self) -> None:
        """Raise `ConfigError` where a value is out of its range. What the model or the machine can hold is checked
        later, by those who know them."""

        def need(ok: bool, key: str, what: str) -> None:
            if not ok:
                value: Any = self
                for part in key.split("."):
                    value = getattr(value, part)
                raise ConfigError(f"{key}={'null' if value is None else value}: {key} must be {what}.")

        def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
            need(value in choices, key, "one of " + ", ".join(choices))

        need(bool(self.model), "model", "a shipped model's name, a directory or a Hugging Face id")
        one_of("load", self.load, LOADS)
        one_of("dtype", self.dtype, DTYPES)
        one_of("device", self.device, DEVICES)
        for key in ("tp", "page_size", "max_running_requests", "max_prefill_tokens", "starvation_steps"):
            need(getattr(self, key) >= 1, key, "at least 1")
        for key in ("num_pages", "max_seq_len"):
            need(getattr(self, key) is None or getattr(self, key) >= 1, key, "at least 1, or null for the default")
        need(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(0.0 < self.memory_ratio <= 1.0, "memory_ratio", "above 0 and at most 1")
        need(bool(self.server.host), "server.host", "a host name or an address")
        need(0 <= self.server.port <= 65535, "server.port", "between 0 (any free port) and 65535")
        need(self.server.tokenizers >= 0, "server.tokenizers", "at least 0")
        need(self.server.api_key != "", "server.api_key", "a key, or null for none")
        need(self.server.served_model_name != "", "server.served_model_name", "a name, or null for the model's")
        need(self.server.max_queued >= 1, "server.max_queued", "at least 1")
        for key in ("drain_timeout", "watchdog"):
            seconds = getattr(self.server, key)
            need(math.isfinite(seconds) and seconds >= 0.0, f"server.{key}", "a number of seconds, at least 0")
        one_of("server.log_level", self.server.log_level, LOG_LEVELS)
