"""Every top-level option of minisgl, with its unit and its default, as plain dataclasses without Hydra.

The string below a field documents that option; ``--help`` and the options page print it. The value of a group
(``attention``, ``cache``, …) is an instance of the dataclass that a plugin registered for the chosen name. The core
calls the instance's method `build` and never reads its fields.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

Part = Any
"""The options of the part of a group: an instance of the dataclass that a plugin registered for the chosen name."""
ROUTER_GROUPS = ("routing", "router")
"""The groups of `python -m minisgl.cluster` only: a server has no router."""
OPTION_PLUGINS = MappingProxyType(
    {
        "trace": ("observer", "trace"),
        "kv_events": ("observer", "kv_events"),
        "knock_out": ("models", "moe_options"),
        "load_format": ("models", "dummy"),
        "verification_rounds": ("speculation", "rounds"),
    }
)
"""Option → the built-in plugin, a kind and a name, that is loaded if the option's value is not the default."""
PLAIN = MappingProxyType({"attention": "torch", "cache": "naive", "scheduler": "prefill_first"})
"""Group → the part that the engine uses if the group's default part does not exist.

In the other groups the engine then does without a part: no graphs, no drafts, one rank.
"""
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZE = ("auto", "fp8", "int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
GENERATION_CONFIG = ("auto", "none")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOG_FORMATS = ("text", "json")
SECTIONS = MappingProxyType(
    {
        "server": ("http", "HttpConfig"),
        "kv_events": ("observer.kv_events_options", "KVEventsConfig"),
        "multi_node": ("ranks.torchrun_options", "MultiNodeConfig"),
    }
)
"""Option of `Config` that has further ones → the module in ``plugins`` and the dataclass that declares and checks them.
"""


class ConfigError(ValueError):
    """An option, or a file that an option names, is invalid and the user must change it.

    The message says what was given, what is wrong with it and what to do. The command line prints the message and exits
    with status 2.
    """


def checker(options: object, prefix: str = "") -> Callable[[bool, str, str], None]:
    """Return a function ``need(ok, key, what)``, which raises `ConfigError` unless ``ok``.

    ``key`` is a field of ``options``, a dataclass whose keys begin with ``prefix``, and must be ``what``.
    """

    def need(ok: bool, key: str, what: str) -> None:
        if not ok:
            value = getattr(options, key)
            raise ConfigError(f"{prefix}{key}={'null' if value is None else value}: {prefix}{key} must be {what}.")

    return need


@dataclass
class ServerConfig:
    """Options of the HTTP server and its processes. Those of its extensions are in ``plugins/http/__init__.py``."""

    host: str = "127.0.0.1"
    """The address to listen on. ``0.0.0.0`` listens on all addresses of the machine."""
    port: int = 1919
    """The TCP port to listen on. With 0, the server picks a free port and prints it."""
    tokenizers: int = 1
    """Number of tokenizer processes. With 0, the detokenizer process also tokenizes."""
    api_key: str | None = None
    """If set, every request must send the header ``Authorization: Bearer <api_key>``."""
    served_model_name: str | None = None
    """The name of the model in the API. Default: the value of the option ``model``."""
    max_queued: int = 4096
    """Maximum number of open requests (waiting and running). A request above this limit gets HTTP status 503, or takes
    the place of those of a client that has more than its share."""
    drain_timeout: float = 30.0
    """Seconds that open requests may take to finish after SIGTERM, before the server stops."""
    extensions: list[str] | None = None
    """The extensions of the API server that are loaded, by name. An option of the server that belongs to another one is
    refused. Default: all that the folder ``plugins/http`` has."""

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range."""
        need = checker(self, "server.")
        need(bool(self.host), "host", "a host name or an address")
        need(0 <= self.port <= 65535, "port", "between 0 (any free port) and 65535")
        need(self.tokenizers >= 0, "tokenizers", "at least 0")
        need(self.api_key != "", "api_key", "a key, or null for none")
        need(self.served_model_name != "", "served_model_name", "a name, or null for the model's")
        need(self.max_queued >= 1, "max_queued", "at least 1")
        seconds_ok = math.isfinite(self.drain_timeout) and self.drain_timeout >= 0.0
        need(seconds_ok, "drain_timeout", "a number of seconds, at least 0")


def section(name: str, plain: Callable[[], object] = lambda: None) -> object:
    """Return the default options of a section of `SECTIONS`, or those that ``plain`` makes if its plugin is missing."""
    module, dataclass_name = SECTIONS[name]
    try:
        found = importlib.import_module(f"minisgl.plugins.{module}")
    except ModuleNotFoundError:
        return plain()
    made: object = getattr(found, dataclass_name)()
    return made


@dataclass
class Config:
    """All options of one engine or server."""

    model: str = "tutor"
    """The name of a model that ships with minisgl, a checkpoint directory, a GGUF file, or a Hugging Face model id."""
    load_format: str = "auto"
    """``auto`` loads weights from safetensors files. ``dummy`` fills the shapes in config.json with random weights."""
    architecture: str | None = None
    """Architecture name of the model class to use, as a plugin registered it. Default: the name in config.json."""
    knock_out: str | None = None
    """Expert whose output is set to zero, to see its effect: ``3`` in every layer, ``5:3`` only in layer 5."""
    dtype: str = "auto"
    """``float32``, ``bfloat16`` or ``float16``. ``auto`` is float32 on a CPU and the checkpoint's dtype on a GPU."""
    quantize: str = "auto"
    """``auto`` keeps the linear layers as the checkpoint stores them, but dequantises weights in FP8 that have another
    layout than blocks of 128 × 128. ``fp8`` also quantises linear layers and experts in another dtype or layout while
    they are loaded: e4m3 with a scale for each block of 128 × 128. ``int8`` and ``int4`` quantise the linear layers,
    the embedding and the LM head of a dense model, on a CPU: integers with a scale for each 32 columns of a row."""
    device: str = "auto"
    """``cpu`` or ``cuda``. ``auto`` is cuda if torch finds a CUDA device, else cpu."""
    tp: int = 1
    """Number of tensor-parallel ranks. Each rank is one process."""
    seed: int = 0
    """Seed of dummy weights, and of the seeds of requests that do not set one."""
    generation_config: str = "auto"
    """``auto`` applies the sampling parameters in the model's generation_config.json to requests that leave them out:
    temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens. ``none`` does not. The end-of-sequence ids
    in that file are used with both."""
    parse_special_tokens: bool = False
    """Whether special tokens in the strings of chat messages become tokens. By default they are text, so that the
    writer of a message can't end it and write another one. Prompts that are no chat are always parsed."""
    page_size: int = 16
    """Tokens per KV page."""
    num_pages: int | None = None
    """Pages in the KV pool. Default: as many as fit into the memory that ``memory_ratio`` allows."""
    memory_ratio: float = 0.9
    """Share of the GPU's total memory that may be in use once the KV pool is allocated, weights included. On a CPU this
    option has no effect: the KV pool gets 0.1 of the machine's memory, at most 4 GiB."""
    max_running_requests: int = 256
    """Maximum number of running requests: requests that own KV pages at the same time."""
    max_seq_len: int | None = None
    """Maximum tokens of a request, prompt and output together. Default: the model's context length."""
    max_prefill_tokens: int = 8192
    """Maximum prompt tokens computed in one step. A longer prompt is split into chunks. With ``scheduler=mixed``,
    decode rows count too, but leave at least a quarter to prompts."""
    max_draft_tokens: int = 512
    """Maximum draft tokens of all requests in one step, or in each round of a step that has several. They do not count
    as ``max_prefill_tokens``."""
    verification_rounds: int = 1
    """Largest number of rounds of a step that verifies drafts. After each round but the last, the engine itself drafts
    what followed the last tokens of a request where they occurred before. The host waits once for all rounds, and a
    request that arrives meanwhile waits too. Steps have several rounds only while no request waits."""
    overlap: bool = True
    """Whether the host prepares the next step while the device computes the current step."""
    starvation_steps: int = 512
    """Steps that a policy may leave a request out. Then the scheduler itself adds the request to the next plan in which
    it fits beside the requests that arrived before it."""
    trace: str = ""
    """The file to which every scheduling event is written, as JSON lines. Empty: no trace."""
    log_level: str = "info"
    """The level of every process's log: ``critical``, ``error``, ``warning``, ``info`` or ``debug``."""
    log_format: str = "text"
    """Format of log lines on standard error: ``text``, or ``json`` for one JSON object per line."""
    plugins: list[str] = field(default_factory=list)
    """Python files or module names of additional plugins to load."""

    server: Any = field(default_factory=partial(section, "server", ServerConfig))
    kv_events: Any = field(default_factory=partial(section, "kv_events"))
    multi_node: Any = field(default_factory=partial(section, "multi_node"))

    attention: Part = None
    cache: Part = None
    scheduler: Part = None
    moe: Part = None
    graph: Part = None
    communicator: Part = None
    speculation: Part = None
    kernels: Part = None
    quantization: Part = None  # None: the part that the checkpoint or ``quantize`` names, with its default options
    fp8_gemm: Part = None
    routing: Part = None  # None, except in a cluster's options
    router: Part = None
    tokenizer: Part = None
    grammar: Part = None
    tool_parser: Part = None
    reasoning_parser: Part = None
    live: Part = None

    defaults_file: ClassVar[str] = "config.yaml"
    """The file in ``conf/`` with the defaults of the groups."""

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range.

        Limits of the model and of the machine are not known here. The code that loads the model checks them.
        """

        need = checker(self)

        def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
            need(value in choices, key, "one of " + ", ".join(choices))

        need(bool(self.model), "model", "a shipped model's name, a directory or a Hugging Face id")
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("dtype", self.dtype, DTYPES)
        one_of("quantize", self.quantize, QUANTIZE)
        one_of("device", self.device, DEVICES)
        one_of("generation_config", self.generation_config, GENERATION_CONFIG)
        for key in (
            "tp",
            "page_size",
            "max_running_requests",
            "max_prefill_tokens",
            "starvation_steps",
            "max_draft_tokens",
            "verification_rounds",
        ):
            need(getattr(self, key) >= 1, key, "at least 1")
        for key in ("num_pages", "max_seq_len"):
            need(getattr(self, key) is None or getattr(self, key) >= 1, key, "at least 1, or null for the default")
        need(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(0.0 < self.memory_ratio <= 1.0, "memory_ratio", "above 0 and at most 1")
        one_of("log_level", self.log_level, LOG_LEVELS)
        one_of("log_format", self.log_format, LOG_FORMATS)
        for options in (self.server, self.kv_events, self.multi_node):
            if options is not None:
                options.check()


GROUPS = tuple(each.name for each in fields(Config) if each.type == "Part")
"""The groups of parts, in the order of the fields of `Config`."""
