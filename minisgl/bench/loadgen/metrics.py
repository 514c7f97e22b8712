"""Metrics of a measurement, with the definitions and field names of ``vllm bench serve``.

For a complete request with n output tokens: TTFT is the time from sending it to its first event with output, E2EL the
time to its last, ITL each time between two such events, and TPOT (E2EL − TTFT) / (n − 1). Failed and interrupted
requests count in no metric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minisgl.bench.loadgen.completion import RequestRecord

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)


def tpot(record: RequestRecord) -> float:
    """Return the mean seconds per output token after the first; 0 for a single token."""
    return (record.latency - record.ttft) / (record.output_len - 1) if record.output_len > 1 else 0.0


def itls(record: RequestRecord) -> list[float]:
    """Return the seconds between consecutive events with output."""
    return [later - earlier for earlier, later in pairwise(record.times)]


def is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Return whether a complete request keeps all ``limits``: name of the metric → milliseconds."""
    values = {"ttft": record.ttft, "tpot": tpot(record), "e2el": record.latency}
    return all(values[name] * 1e3 <= limit for name, limit in limits.items())


def summarize(records: Sequence[RequestRecord], duration: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the metrics of all requests of a measurement that took ``duration`` seconds."""
    done = [record for record in records if record.completed]
    output = sum(record.output_len for record in done)
    total_input = sum(record.prompt_len for record in done)
    per_second = 1.0 / duration if duration > 0 else 0.0
    events = sum(len(record.times) for record in done)
    values = {
        "ttft": [record.ttft for record in done],
        "tpot": [tpot(record) for record in done if record.output_len > 1],
        "itl": [itl for record in done for itl in itls(record)],
        "e2el": [record.latency for record in done],
    }
    return {
        "duration": duration,
        "completed": len(done),
        "failed": sum(bool(record.error) for record in records),
        "total_input_tokens": total_input,
        "total_output_tokens": output,
        "request_throughput": len(done) * per_second,
        "request_goodput": sum(is_good(r, limits) for r in done) * per_second if limits else None,
        "output_throughput": output * per_second,
        "total_token_throughput": (total_input + output) * per_second,
        "max_output_tokens_per_s": max_tokens_per_second(done),
        "max_concurrent_requests": max_concurrency(done),
        **{name: value for metric in METRICS for name, value in statistics(metric, values[metric]).items()},
        "interrupted": sum(record.interrupted for record in records),
        "failures": counted(record.error for record in records),
        "wrong": counted(record.wrong for record in records if record.completed),
        "cached_prompt_tokens": sum(record.cached_len for record in done),
        "tokens_per_event": output / events if events else 0.0,
    }


def statistics(metric: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles in milliseconds, with vLLM's names; 0 without values."""
    values = np.array(seconds or [0.0]) * 1e3
    found = {
        f"mean_{metric}_ms": float(values.mean()),
        f"median_{metric}_ms": float(np.median(values)),
        f"std_{metric}_ms": float(values.std()),
    }
    return found | {f"p{p}_{metric}_ms": float(np.percentile(values, p)) for p in PERCENTILES}


def counted(reasons: Iterable[str]) -> dict[str, int]:
    """Return how often each reason occurs, the most frequent first. Empty reasons do not count."""
    return dict(Counter(filter(None, reasons)).most_common())


def max_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the largest number of requests in flight at the same time. A request ends with its last token."""
    events = sorted(event for r in records for event in ((r.start, 1), (r.start + r.latency, -1)))
    return int(np.cumsum([change for _, change in events]).max(initial=0)) if events else 0


def tokens_by_second(records: Sequence[RequestRecord]) -> list[float]:
    """Return the output tokens of each second since the first request was sent.

    The tokens of a request are spread evenly over its events.
    """
    begin = min((record.start for record in records), default=0.0)
    end = max((record.times[-1] for record in records if record.times), default=begin)
    found = np.zeros(math.floor(end - begin) + 1)
    for record in records:
        if record.times:
            seconds = (np.array(record.times) - begin).astype(int)
            np.add.at(found, seconds, record.output_len / len(record.times))
    return [float(tokens) for tokens in found]


def max_tokens_per_second(records: Sequence[RequestRecord]) -> float:
    """Return the output tokens of the second with the most output tokens."""
    return max(tokens_by_second(records)) if records else 0.0


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the values of every single request in order of their indices, with vLLM's names; times in seconds."""
    ordered = sorted(records, key=lambda record: record.index)
    return {
        "input_lens": [record.prompt_len for record in ordered],
        "output_lens": [record.output_len if record.completed else 0 for record in ordered],
        "ttfts": [record.ttft for record in ordered],
        "itls": [itls(record) for record in ordered],
        "latencies": [record.latency for record in ordered],
        "start_times": [record.start for record in ordered],
        "generated_texts": [record.text for record in ordered],
        "errors": [record.error or ("interrupted" if record.interrupted else "") for record in ordered],
    }
