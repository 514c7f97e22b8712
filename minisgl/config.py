"""Every top-level option of minisgl, with its unit and its default, as plain dataclasses without Hydra.

The string below a field documents that option; ``--help`` and the options page print it. The value of a group
(``attention``, ``cache``, …) is an instance of the dataclass that a plugin registered for the chosen name. The core
calls the instance's method `build` and never reads its fields.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

GROUPS = (
    "attention",
    "cache",
    "scheduler",
    "moe",
    "graph",
    "communicator",
    "speculation",
    "kernels",
    "quantization",
    "fp8_gemm",
    "routing",
    "router",
    "tokenizer",
    "grammar",
    "tool_parser",
    "reasoning_parser",
    "live",
)
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
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ADDRESS = re.compile(r"tcp://[^\s/;]+:(?P<port>\*|[0-9]{1,5})|ipc:///[^\s]+")


class ConfigError(ValueError):
    """An option, or a file that an option names, is invalid and the user must change it.

    The message says what was given, what is wrong with it and what to do. The command line prints the message and exits
    with status 2.
    """


@dataclass
class ServerConfig:
    """Options of the HTTP server and its processes."""

    host: str = "127.0.0.1"
    """The address to listen on. ``0.0.0.0`` listens on all addresses of the machine."""
    port: int = 1919
    """The TCP port to listen on. With 0, the server picks a free port and prints it."""
    tokenizers: int = 1
    """Number of tokenizer processes. With 0, the detokenizer process also tokenizes."""
    api_key: str | None = None
    """If set, every request must send the header ``Authorization: Bearer <api_key>``."""
    admin_key: str | None = None
    """If set, a request with the header ``Authorization: Bearer <admin_key>`` may empty the prefix cache
    (``/flush_cache``) and abort requests (``/abort_request``). Default: no request may."""
    served_model_name: str | None = None
    """The name of the model in the API. Default: the value of the option ``model``."""
    max_queued: int = 4096
    """Maximum number of open requests (waiting and running). A request above this limit gets HTTP status 503, or takes
    the place of those of a client that has more than its share."""
    max_choices: int | None = None
    """Maximum number of choices of one HTTP request: ``n`` for each prompt. More get HTTP status 400. Default: a
    quarter of ``max_queued``, but not less than 128."""
    max_body: int | None = None
    """Maximum size of a request's body in bytes. A larger one gets HTTP status 413. Default: 64 bytes for each token
    that the server allows for a request, and at least 1 MiB."""
    max_connections: int = 8192
    """Maximum number of open connections; the limit of file descriptors may allow fewer. A new connection above it
    takes the place of one that waits for a request, or gets HTTP status 503."""
    io_timeout: float = 30.0
    """Seconds that a client may take to send a request's headers or the next 64 KiB of its body, or to read the next
    part of a response. Then the server closes the connection."""
    drain_timeout: float = 30.0
    """Seconds that open requests may take to finish after SIGTERM, before the server stops."""
    watchdog: float = 300.0
    """Seconds after which a process that is still busy with the same step or message counts as dead. The server then
    stops. 0 turns the watchdog off."""
    request_timeout: float | None = None
    """Seconds that a request may take from its arrival to the end of its response. Then it is aborted, and its response
    is an error with HTTP status 504, or ends with one. Default: no limit."""
    root_path: str = ""
    """The prefix under which a proxy publishes the server, such as ``/llm``. The proxy may remove the prefix or leave
    it in the paths of requests."""
    cors_origins: list[str] = field(default_factory=list)
    """The origins, such as ``https://chat.example.com``, whose web pages may call the server from a browser. ``*``
    allows all. Pages of the server's own host may always. Default: no others."""
    allowed_hosts: list[str] = field(default_factory=list)
    """The names, such as ``llm.example.com``, that the header ``Host`` may have if the server listens at a loopback
    address and has no ``api_key``: those of proxies. Addresses and names without a dot are always allowed, ``*`` allows
    all. This keeps out web sites whose name resolves to the server's address. Default: no others."""
    tls_cert: str | None = None
    """A file in PEM format with the server's certificate and those of its authorities. The server then speaks HTTPS
    only."""
    tls_key: str | None = None
    """A file in PEM format with the certificate's private key, not encrypted. Default: ``tls_cert`` has the key too."""
    otlp_endpoint: str | None = None
    """The address of an OpenTelemetry collector, such as ``http://localhost:4318``, that gets a span of each generation
    (OTLP over HTTP). It needs ``minisgl[otel]``. Default: no traces."""
    responses_store: str = "none"
    """Where ``/v1/responses`` stores responses: ``none``, or ``memory``, which keeps the last ones, at most 64 MiB.
    Each client with the API key can read a stored response whose id it knows."""
    extensions: list[str] | None = None
    """The extensions of the API server that are loaded, by name. An option of the server that belongs to another one is
    refused. Default: all that the folder ``plugins/http`` has."""


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


@dataclass
class MultiNodeConfig:
    """Options of ranks that torchrun starts, on one node or several. All of them run with the same command line."""

    secret_file: str | None = None
    """A file with a secret of at least 16 bytes that all ranks have. Only its owner may have access to it. With several
    ranks it is needed."""
    interface: str | None = None
    """The network interface that connects the ranks, such as ``eth0``: rank 0 listens at its address, and gloo and NCCL
    use it. Or an address of rank 0's machine to listen at. With several ranks it is needed."""
    listen_port: int = 0
    """The TCP port at which rank 0 listens for the other ranks. With 0, it is any free port."""
    connect_timeout: float = 300.0
    """Seconds that the other ranks may take to connect to rank 0."""


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
    layout than blocks of 128 × 128, and those of a model with experts. ``fp8`` also quantises the linear layers of a
    dense model in another dtype or layout while it is loaded: e4m3 with a scale for each block of 128 × 128. ``int8``
    and ``int4`` quantise them, the embedding and the LM head, on a CPU: integers with a scale for each 32 columns of a
    row."""
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

    server: ServerConfig = field(default_factory=ServerConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    multi_node: MultiNodeConfig = field(default_factory=MultiNodeConfig)

    attention: Any = None
    cache: Any = None
    scheduler: Any = None
    moe: Any = None
    graph: Any = None
    communicator: Any = None
    speculation: Any = None
    kernels: Any = None
    quantization: Any = None  # None: the part that the checkpoint or ``quantize`` names, with its default options
    fp8_gemm: Any = None
    routing: Any = None  # None, except in a cluster's options
    router: Any = None
    tokenizer: Any = None
    grammar: Any = None
    tool_parser: Any = None
    reasoning_parser: Any = None
    live: Any = None

    defaults_file: ClassVar[str] = "config.yaml"
    """The file in ``conf/`` with the defaults of the groups."""

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range.

        Limits of the model and of the machine are not known here. The code that loads the model checks them.
        """

        def need(ok: bool, key: str, what: str) -> None:
            if not ok:
                value: Any = self
                for part in key.split("."):
                    value = getattr(value, part)
                raise ConfigError(f"{key}={'null' if value is None else value}: {key} must be {what}.")

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
        need(bool(self.server.host), "server.host", "a host name or an address")
        need(0 <= self.server.port <= 65535, "server.port", "between 0 (any free port) and 65535")
        need(self.server.tokenizers >= 0, "server.tokenizers", "at least 0")
        need(self.server.api_key != "", "server.api_key", "a key, or null for none")
        need(self.server.admin_key != "", "server.admin_key", "a key, or null for none")
        need(self.server.served_model_name != "", "server.served_model_name", "a name, or null for the model's")
        for key in ("max_queued", "max_connections"):
            need(getattr(self.server, key) >= 1, f"server.{key}", "at least 1")
        max_choices = self.server.max_choices
        need(self.server.responses_store in ("none", "memory"), "server.responses_store", "none or memory")
        choices_ok = max_choices is None or 1 <= max_choices <= self.server.max_queued
        need(choices_ok, "server.max_choices", "from 1 to server.max_queued, or null for the default")
        max_body = self.server.max_body
        need(max_body is None or max_body >= 1, "server.max_body", "at least 1, or null for the default")
        for key in ("drain_timeout", "watchdog"):
            seconds = getattr(self.server, key)
            need(math.isfinite(seconds) and seconds >= 0.0, f"server.{key}", "a number of seconds, at least 0")
        seconds = self.server.io_timeout
        need(math.isfinite(seconds) and seconds > 0.0, "server.io_timeout", "a number of seconds above 0")
        timeout = self.server.request_timeout
        seconds_ok = timeout is None or (math.isfinite(timeout) and timeout > 0.0)
        need(seconds_ok, "server.request_timeout", "a number of seconds above 0, or null for no limit")
        root = self.server.root_path
        root_ok = root == "" or re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root) is not None
        need(root_ok, "server.root_path", "a path such as /llm, without a slash at its end, or empty")
        origins_ok = all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in self.server.cors_origins)
        need(origins_ok, "server.cors_origins", "a list of origins such as https://example.com:8443 (no path), or [*]")
        hosts_ok = all(host == "*" or _HOST_NAME.fullmatch(host) for host in self.server.allowed_hosts)
        need(hosts_ok, "server.allowed_hosts", "a list of names such as llm.example.com (no port), or [*]")
        need(self.server.tls_cert != "", "server.tls_cert", "a file, or null for no TLS")
        need(self.server.tls_key is None or self.server.tls_cert is not None, "server.tls_key", "used with tls_cert")
        endpoint = self.server.otlp_endpoint
        endpoint_ok = endpoint is None or re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", endpoint) is not None
        need(endpoint_ok, "server.otlp_endpoint", "a URL such as http://localhost:4318, or null for no traces")
        for key in ("endpoint", "replay_endpoint"):
            address = getattr(self.kv_events, key)
            match = _ADDRESS.fullmatch("tcp://*:0" if address is None else address)
            address_ok = match is not None and (match["port"] in (None, "*") or int(match["port"]) <= 65535)
            need(address_ok, f"kv_events.{key}", "an address such as tcp://127.0.0.1:5557 or ipc:///run/kv, or null")
        replay_ok = self.kv_events.replay_endpoint is None or self.kv_events.endpoint is not None
        need(replay_ok, "kv_events.replay_endpoint", "used with kv_events.endpoint")
        need(self.kv_events.buffer_steps >= 1, "kv_events.buffer_steps", "at least 1")
        need(0 <= self.kv_events.hwm < 2**31, "kv_events.hwm", "at least 0, and below 2^31")
        need(-(2**63) <= self.kv_events.hash_seed < 2**63, "kv_events.hash_seed", "a 64-bit integer")
        one_of("log_level", self.log_level, LOG_LEVELS)
        one_of("log_format", self.log_format, LOG_FORMATS)
