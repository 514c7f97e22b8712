"""Measures a server: finds its model and vocabulary, and runs every point of a sweep."""

from __future__ import annotations

import json
import math
import os
import platform
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.bench.loadgen import metrics, report
from minisgl.bench.loadgen.arrivals import arrival_times, replay_times
from minisgl.bench.loadgen.client_load import client_load
from minisgl.bench.loadgen.completion import RequestRecord, Template
from minisgl.bench.loadgen.drafts import DraftCounts, draft_fields, read_counts
from minisgl.bench.loadgen.http import ServerAddress
from minisgl.bench.loadgen.options import LoadOptions, OnlineOptions, ReplayOptions
from minisgl.bench.loadgen.plan import Plan
from minisgl.bench.loadgen.prompts import PromptFactory, RandomWorkload, TraceWorkload, Vocabulary, Workload
from minisgl.bench.loadgen.run import Measurement, run
from minisgl.bench.loadgen.traces import TraceRequest, read_trace, with_tokenizer, within
from minisgl.bench.loadgen.vocabulary import find_tokenizer, vocabulary
from minisgl.bench.workload import parse_range
from minisgl.config import ConfigError
from minisgl.utils.version import __version__

DEFAULT_REQUESTS = 64
SEED_STEP = 1_000_003
"""Difference between the seeds of two points of a sweep, so that no point finds the prompts of another in the cache."""


@dataclass(frozen=True)
class Target:
    """The server that is measured, and what is known of its model. ``salt`` makes the prompts of this run new."""

    address: ServerAddress
    model: str
    max_len: int | None
    vocabulary: Vocabulary
    tokenizer_id: str | None
    salt: int = 0


@dataclass(frozen=True)
class Point:
    """One measurement: the requests, and either their times or the number of clients."""

    workload: Workload
    due: np.ndarray[Any, np.dtype[np.float64]] | None
    clients: int
    fields: dict[str, Any]
    """The fields of the report that describe the load."""


@dataclass
class Results:
    """What was measured: one report and the records of its requests for each point of a sweep.

    ``interrupted``: Ctrl-C ended the sweep, in its last point or after it.
    """

    sweep: bool
    reports: list[dict[str, Any]] = field(default_factory=list)
    records: list[list[RequestRecord]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def title(self) -> str:
        """The title of a table or a plot."""
        return f"{self.reports[0]['model_id']} at {self.reports[0]['options']['url']}"


def measure(options: OnlineOptions | ReplayOptions) -> Results:
    """Measure every point of a sweep. Raise KeyboardInterrupt after Ctrl-C only if nothing was measured."""
    target, requests = find_target(options)
    results = Results(len(options.points) > 1)
    try:
        for number, value in enumerate(options.points):
            point = _point(options, value, requests)
            measured = run_point(options, target, point, number)
            results.reports.append(_report(options, target, point, measured))
            results.records.append(measured.records)
            if measured.interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not results.reports:
            raise
        results.interrupted = True
    return results


def find_target(options: OnlineOptions | ReplayOptions) -> tuple[Target, list[TraceRequest] | None]:
    """Return the server to measure, and the requests of the trace if one is given. Raise `ConfigError`."""
    address = ServerAddress.parse(options.url, options.api_key or os.environ.get("OPENAI_API_KEY"))
    model, max_len = options.model, options.max_len
    if model is None:
        model, found_len = ask_model(address)
        max_len = max_len or found_len
    tokenizer = find_tokenizer(options.tokenizer, model)
    words = vocabulary(tokenizer, options.vocab_size, options.text_prompts)
    tokenizer_id = None if tokenizer is None else options.tokenizer or model
    target = Target(address, model, max_len, words, tokenizer_id, time.time_ns() if options.new_prompts else 0)
    return target, _trace_requests(options, tokenizer, target) if options.trace else None


def ask_model(address: ServerAddress) -> tuple[str, int | None]:
    """Return the name of the first model of /v1/models, and its maximum length if it is given. Raise `ConfigError`."""
    url = f"{'https' if address.tls else 'http'}://{address.host_header}{address.base}/v1/models"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, as for the measured requests
    try:
        with opener.open(urllib.request.Request(url, headers=dict(address.headers)), timeout=30) as response:
            card = json.load(response)["data"][0]
        return str(card["id"]), card.get("max_model_len")
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answered with HTTP status {error.code}. {error.reason}.") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no server answers at {url}: {reason}. Start one with python -m minisgl.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{url} lists no model: give model=NAME.") from error


def _trace_requests(options: OnlineOptions | ReplayOptions, tokenizer: Any, target: Target) -> list[TraceRequest]:
    """Return the requests of the trace that the server can take, at most ``requests``."""
    default = parse_range(options.output)[1] if isinstance(options, OnlineOptions) else DEFAULT_REQUESTS
    found = read_trace(Path(str(options.trace)), default)
    if tokenizer is not None:
        found = with_tokenizer(found, tokenizer.encode, not options.text_prompts)
    elif isinstance(found[0].prompt, str) and not options.text_prompts:
        raise ConfigError("the trace has texts: give tokenizer=DIRECTORY, or prompts=text.")
    if target.max_len is not None:
        fitting = within(found, target.max_len)
        if left_out := len(found) - len(fitting):
            print(f"{left_out:,} of {len(found):,} requests of the trace have more than {target.max_len:,} tokens and "
                  "are left out.")  # fmt: skip
        found = fitting
    if options.requests is not None:
        found = found[: options.requests]
    if not found:
        raise ConfigError(f"trace={options.trace}: no request is left.")
    return found


def _point(options: OnlineOptions | ReplayOptions, value: float, requests: list[TraceRequest] | None) -> Point:
    if isinstance(options, OnlineOptions):
        return _online_point(options, value, requests)
    assert requests is not None
    return _replay_point(options, value, requests)


def _online_point(options: OnlineOptions, value: float, requests: list[TraceRequest] | None) -> Point:
    """Return the point with the rate ``value``, or with this number of clients."""
    count = options.requests or (len(requests) if requests else None)
    if options.duration is not None and not options.clients:
        count = max(1, round(value * options.duration))
        if requests and len(requests) < count:
            raise ConfigError(
                f"rate={value:g} duration={options.duration:g}: the trace has {len(requests):,} requests."
            )
    if count is None and options.duration is None:
        count = DEFAULT_REQUESTS
    inputs, outputs = parse_range(options.input), parse_range(options.output)
    workload = TraceWorkload(requests[:count]) if requests else RandomWorkload(count, inputs, outputs, options.seed)
    if options.clients:
        clients = int(value) if count is None else min(int(value), count)
        return Point(workload, None, clients, _load_fields(math.inf, 1.0, int(value)))
    assert count is not None
    due = arrival_times(count, value, options.burstiness, options.seed)
    return Point(workload, due, count, _load_fields(value, options.burstiness, None))


def _load_fields(rate: float, burstiness: float, clients: int | None) -> dict[str, Any]:
    return {
        "request_rate": report.plain_number(rate),
        "burstiness": report.plain_number(burstiness),
        "max_concurrency": clients,
    }


def _replay_point(options: ReplayOptions, speed: float, requests: list[TraceRequest]) -> Point:
    """Return the point that plays the trace ``speed`` times as fast."""
    times = [request.timestamp for request in requests]
    if None in times:
        raise ConfigError(f"trace={options.trace} has no times: use it with bench online and rate= or clients=.")
    due = replay_times(np.array(times, dtype=float), speed)
    if options.duration is not None:
        due = due[due < options.duration]
        requests = requests[: len(due)]
    mean = len(due) / due[-1] if len(due) and due[-1] > 0 else math.inf
    fields = {**_load_fields(mean, 1.0, None), "replay_speed": speed}
    return Point(TraceWorkload(requests), due, len(due), fields)


def plans(options: LoadOptions, target: Target, point: Point, number: int) -> list[Plan]:
    """Return the plan of each client process: request ``i`` belongs to process ``i`` modulo their number."""
    seed = options.seed + SEED_STEP * number
    processes = min(options.processes or default_processes(), point.clients)
    shared = options.shared if isinstance(options, OnlineOptions) and not options.trace else 0
    template = Template(options.chat, target.model, options.temperature, options.ignore_eos, seed)
    return [
        Plan(
            target.address, template, point.workload, PromptFactory(target.vocabulary, seed + target.salt, shared),
            first=i, step=processes, total=point.workload.count,
            due=None if point.due is None else point.due[i::processes],
            clients=len(range(i, point.clients, processes)),
            duration=options.duration if point.due is None else None,
            warmup=options.warmup, timeout=options.timeout, keep_text=options.detailed,
        )
        for i in range(processes)
    ]  # fmt: skip


def default_processes() -> int:
    """Return the default of ``processes``: a server on the same machine keeps three quarters of the cores."""
    return max(1, min(8, (os.cpu_count() or 1) // 4))


def run_point(options: LoadOptions, target: Target, point: Point, number: int) -> Measurement:
    """Run one measurement, with a progress bar if standard error is a terminal."""
    tokens = failures = 0
    with tqdm(total=point.workload.count, unit="req", dynamic_ncols=True, disable=None, leave=False) as bar:

        def progress(done: int, failed: int, new_tokens: int) -> None:
            nonlocal tokens, failures
            tokens, failures = tokens + new_tokens, failures + failed
            bar.set_postfix_str(f"{tokens:,} tok, {failures} failed", refresh=False)
            bar.update(done)

        before: list[DraftCounts | None] = []
        measurement = run(
            plans(options, target, point, number), progress, lambda: before.append(read_counts(target.address))
        )
    if before and before[0] is not None:
        measurement.drafts = draft_fields(before[0], read_counts(target.address))
    return measurement


def _report(options: LoadOptions, target: Target, point: Point, measured: Measurement) -> dict[str, Any]:
    """Return the report of one point: vLLM's fields first, then those of minisgl."""
    found = metrics.summarize(measured.records, measured.duration, options.limits)
    load = client_load(measured.results, found["median_ttft_ms"] / 1e3, found["p99_itl_ms"] / 1e3)
    plain = asdict(options) | {"api_key": None}
    plain = {key: report.plain_number(value) if isinstance(value, float) else value for key, value in plain.items()}
    return {
        **report.head(options.chat, target.model, target.tokenizer_id, point.workload.count, point.fields),
        **found,
        **measured.drafts,
        **(metrics.details(measured.records) if options.detailed else {}),
        "interrupted_run": measured.interrupted,
        "warmup_failures": metrics.counted(measured.warmup_errors),
        "goodput_limits": options.limits,
        "client": load.plain(),
        "options": plain,
        "client_machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "minisgl": __version__},
    }
