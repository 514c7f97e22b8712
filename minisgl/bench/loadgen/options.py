"""The options of ``bench online`` and ``bench replay``, and the named workloads.

An option is a word ``key=value``, as for the server. `read_options` builds the dataclass and checks every value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from textwrap import fill
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from minisgl.bench.workload import parse_range
from minisgl.config import ConfigError
from minisgl.plugin_manager.discovery import near
from minisgl.plugins.command.describe import options_of
from minisgl.plugins.command.help import help_of
from minisgl.plugins.command.listing import default_text, type_name

T = TypeVar("T", bound="LoadOptions")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""The metrics that ``goodput=`` can limit, with the names that ``vllm bench serve`` uses."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options that ``bench online`` and ``bench replay`` share."""

    url: str = "http://127.0.0.1:1919"
    """Address of the server, without ``/v1``."""
    endpoint: str = "completions"
    """``completions`` sends to /v1/completions, ``chat`` to /v1/chat/completions."""
    model: str | None = None
    """Name of the model in every request. The default is the first model that /v1/models lists."""
    api_key: str | None = None
    """Key for the header ``Authorization: Bearer``. The default is the value of the environment variable
    OPENAI_API_KEY."""
    requests: int | None = None
    """Number of requests. The default is 64, or all requests of a trace. In a closed loop with ``duration``, the
    default is no limit."""
    duration: float | None = None
    """Seconds during which requests are sent. Requests in flight at the end of this time are completed."""
    warmup: int = 1
    """Number of requests that are sent before the measurement and not counted. Their prompts are not used again."""
    prompts: str = "auto"
    """``ids`` sends prompts as token ids. ``text`` sends prompts as text. ``auto`` is ``ids`` for
    ``endpoint=completions`` and ``text`` for ``endpoint=chat``."""
    tokenizer: str | None = None
    """Directory with the model's tokenizer.json, or the name of a model that minisgl ships. The default is the model's
    name, if minisgl ships that model or if the name is a directory."""
    vocab_size: int | None = None
    """If there is no tokenizer, random token ids are below this number."""
    max_len: int | None = None
    """Largest number of tokens of a request of a trace, prompt and output together. Longer requests are left out. The
    default is the length that /v1/models gives. If it gives none, all requests are sent."""
    temperature: float = 0.0
    """Sampling temperature. 0 is greedy sampling."""
    ignore_eos: bool = True
    """Whether every output has its full length. With ``false``, an output may end earlier."""
    seed: int = 0
    """Random seed of lengths, prompts and arrival times."""
    new_prompts: bool = True
    """Whether every run has new random prompts, so that the server has none of them in its cache. With ``false``, the
    prompts depend only on ``seed``. Lengths and arrival times always depend only on ``seed``."""
    goodput: str = ""
    """Limits in milliseconds that a request must keep to count as good, such as ``ttft:200,tpot:50``. The metrics
    are ttft, tpot and e2el."""
    processes: int | None = None
    """Number of client processes. The default is one for every four CPU cores, at least 1 and at most 8."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    detailed: bool = False
    """Whether the JSON file has the times and the text of every request."""

    @property
    def chat(self) -> bool:
        return self.endpoint == "chat"

    @property
    def text_prompts(self) -> bool:
        return self.chat if self.prompts == "auto" else self.prompts == "text"

    @property
    def limits(self) -> dict[str, float]:
        """The limits of ``goodput``: name of the metric → milliseconds. Raise `ConfigError`."""
        found = {}
        for pair in filter(None, self.goodput.replace(" ", ",").split(",")):
            name, _, value = pair.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in GOODPUT_METRICS or not limit >= 0:
                raise ConfigError(
                    f"goodput={self.goodput}: {pair!r} is not a limit. Write NAME:MILLISECONDS, such as ttft:200; the "
                    f"names are {', '.join(GOODPUT_METRICS)}."
                )
            found[name] = limit
        return found

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range or two options exclude each other."""
        self.limits  # noqa: B018 - raises
        _need(self.url.startswith(("http://", "https://")), "url", self.url, "begin with http:// or https://")
        _need(self.endpoint in ("completions", "chat"), "endpoint", self.endpoint, "be completions or chat")
        _need(self.prompts in ("auto", "ids", "text"), "prompts", self.prompts, "be auto, ids or text")
        if self.chat and self.prompts == "ids":
            raise ConfigError("endpoint=chat prompts=ids: a chat takes text only. Use endpoint=completions.")
        for key in ("requests", "vocab_size", "max_len", "processes"):
            value = getattr(self, key)
            _need(value is None or value >= 1, key, value, "be at least 1")
        for key in ("duration", "timeout"):
            value = getattr(self, key)
            _need(value is None or 0 < value < math.inf, key, value, "be a number of seconds above 0")
        _need(self.warmup >= 0, "warmup", self.warmup, "be at least 0")
        _need(0 <= self.seed < 2**32, "seed", self.seed, "be an integer from 0 to 2**32 - 1")
        _need(0 <= self.temperature < math.inf, "temperature", self.temperature, "be at least 0")


@dataclass(frozen=True, kw_only=True)
class OnlineOptions(LoadOptions):
    """The options of ``bench online``."""

    workload: str | None = None
    """Name of a workload. It sets ``input``, ``output``, ``rate``, ``clients`` and ``requests``. You can change these
    values with further options."""
    input: str = "512"
    """Prompt length in tokens, or a range ``LOW:HIGH`` from which lengths are drawn uniformly."""
    output: str = "128"
    """Output length in tokens, or a range ``LOW:HIGH``. For a ShareGPT file it is used if there is no
    tokenizer."""
    shared: int = 0
    """Length in tokens of a prefix that all prompts share. It is added to ``input``."""
    trace: str | None = None
    """A trace file. It gives lengths and prefixes in place of ``input``, ``output`` and ``shared``."""
    rate: str | None = None
    """Requests per second, at random times. The times are a Poisson process, unless ``burstiness`` is given. ``inf``
    sends all requests at once. A list such as ``1,2,4`` measures one rate after another."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between requests. 1 is a Poisson process. Smaller values give
    bursts. Larger values give more even times, and ``inf`` gives equal times."""
    clients: str | None = None
    """Number of clients of a closed loop. Each client sends its next request when its last request is complete. A list
    such as ``1,8,64`` measures one number after another."""

    @property
    def points(self) -> list[float]:
        """The rates, or the numbers of clients, to measure."""
        return numbers("clients" if self.clients else "rate", self.clients or self.rate or "inf")

    def check(self) -> None:
        super().check()
        if self.rate and self.clients:
            raise ConfigError("rate= and clients= exclude each other: a closed loop sends when an answer is complete.")
        for point in self.points:
            if self.clients:
                whole = 1 <= point < math.inf and point == int(point)
                _need(whole, "clients", self.clients, "be whole numbers, at least 1")
        if self.duration is not None and not self.clients and (self.requests or math.inf in self.points):
            raise ConfigError("duration= needs a finite rate= without requests=, or clients=.")
        parse_range(self.input)
        parse_range(self.output)
        _need(self.burstiness > 0, "burstiness", self.burstiness, "be above 0")
        _need(self.shared >= 0, "shared", self.shared, "be at least 0")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(LoadOptions):
    """The options of ``bench replay``."""

    trace: str = ""
    """The trace file: Azure's CSV or Mooncake's JSON lines, plain or compressed with gzip."""
    speed: str = "1"
    """Factor by which the trace is played faster: 2 halves all times between requests. A list such as ``1,2,4``
    measures one speed after another."""

    @property
    def points(self) -> list[float]:
        """The speeds to measure."""
        return numbers("speed", self.speed)

    def check(self) -> None:
        super().check()
        _need(bool(self.trace), "trace", self.trace, "be the name of a trace file")
        _need(max(self.points) < math.inf, "speed", self.speed, "be finite")


NAMED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "64-clients": {"input": "512", "output": "256", "clients": "64", "requests": "640"},
        "256-at-once": {"input": "100:1024", "output": "100:1024", "rate": "inf", "requests": "256"},
        "60-per-second": {"input": "512", "output": "128", "rate": "60", "requests": "1800"},
    }
)
"""The workloads of ``workload=``: the options that each sets."""


def numbers(key: str, text: str) -> list[float]:
    """Return the numbers of a list such as ``1,2.5,inf``. Raise `ConfigError` unless all are above 0."""
    try:
        found = [float(word) for word in text.strip("[]").split(",")]
    except ValueError:
        found = []
    if not found or not all(number > 0 for number in found):
        raise ConfigError(f"{key}={text}: {key} must be a number above 0, or a list such as 1,2,4.")
    return found


def read_options(schema: type[T], words: Sequence[str]) -> T:
    """Return the options that words ``key=value`` describe, checked. Raise `ConfigError`."""
    known = [field.name for field in fields(schema)]
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not an option: write key=value.")
        if key not in known:
            raise ConfigError(f"there is no option {key!r}{near(key, known)}")
        values[key] = None if value == "null" else value
    if name := values.get("workload"):
        if name not in NAMED:
            raise ConfigError(f"workload={name}: there is no such workload. Use {', '.join(NAMED)}.")
        if exclusive := {"rate", "clients", "duration"} & values.keys():
            values = {key: NAMED[name][key] for key in ("input", "output")} | values
            if "duration" in exclusive:
                values = {key: value for key, value in NAMED[name].items() if key != "requests"} | values
        else:
            values = {**NAMED[name], **values}
    try:
        options = msgspec.convert(_with_floats(schema, values), schema, strict=False)
    except msgspec.ValidationError as error:
        key = str(error).partition("`$.")[2].rstrip("`")
        raise ConfigError(f"{key}={values.get(key)}: {error}.") from error
    options.check()
    return options


def _with_floats(schema: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with ``inf`` converted in options of type float, where msgspec expects digits."""
    floats = {option.key for option in options_of(schema) if "float" in type_name(option)}
    return {key: math.inf if key in floats and value == "inf" else value for key, value in values.items()}


def _need(ok: bool, key: str, value: Any, what: str) -> None:
    if not ok:
        raise ConfigError(f"{key}={value}: {key} must {what}.")


def describe(schema: type) -> str:
    """Return the description of every option of a dataclass, for ``--help``."""
    lines = ["options, with their defaults:"]
    for option in options_of(schema):
        default = "" if option.default is None else default_text(option)
        lines.append(f"  {option.key}={default}")
        lines.append(fill(help_of(option), 110, initial_indent="      ", subsequent_indent="      "))
    if "workload" in {field.name for field in fields(schema)}:
        lines.append("workloads:")
        for name, values in NAMED.items():
            lines.append(f"  workload={name}: {' '.join(f'{key}={value}' for key, value in values.items())}")
    return "\n".join(lines)
