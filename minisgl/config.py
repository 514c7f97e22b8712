"""Every top-level option of minisgl, with its unit and its default. Plain dataclasses: Hydra stays at the edge.

A group's object (``attention``, ``cache``, …) is an instance of the dataclass that a plugin registered for it;
the core hands it to the plugin's factory and looks at nothing in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GROUPS = ("attention", "cache", "scheduler", "moe", "graph", "communicator")


@dataclass
class ServerConfig:
    """The HTTP server and its processes."""

    host: str = "127.0.0.1"
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
    log_level: str = "warning"


@dataclass
class Config:
    """minisgl's options."""

    model: str = "tutor"
    """A model that ships with minisgl, a directory, or a Hugging Face id."""
    load: str = "auto"
    """``auto`` reads safetensors; ``dummy`` fills the shapes of config.json with random weights."""
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
    plugins: list[str] = field(default_factory=list)
    """Python files or module names with plugins of your own."""

    server: ServerConfig = field(default_factory=ServerConfig)

    attention: Any = None
    cache: Any = None
    scheduler: Any = None
    moe: Any = None
    graph: Any = None
    communicator: Any = None
