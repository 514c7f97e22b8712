"""Draft tokens of a server with speculative decoding, read from its ``/metrics`` before and after a measurement.

The server must count them under vLLM's names. The fields of the report are those of ``vllm bench serve``. Requests of
other clients count too, because the server does not tell them apart.
"""

from __future__ import annotations

import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from minisgl.bench.loadgen.http import ServerAddress

__all__ = ["DraftCounts", "draft_fields", "parse_counts", "read_counts"]

TIMEOUT = 10.0
"""Seconds that a server may take to return its metrics."""
_PREFIX = "vllm:spec_decode_num_"


@dataclass
class DraftCounts:
    """The counters of a server: verified runs of drafts, draft tokens, accepted ones, and these by position."""

    runs: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    per_position: Counter[int] = field(default_factory=Counter)


def parse_counts(text: str) -> DraftCounts | None:
    """Return the sums over all engines of a server, from metrics in Prometheus' text format.

    None: the server counts no drafts, or the text has another format.
    """
    found, counts = False, DraftCounts()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                match sample.name.removeprefix(_PREFIX):
                    case "drafts_total":
                        found = True
                        counts.runs += sample.value
                    case "draft_tokens_total":
                        counts.draft_tokens += sample.value
                    case "accepted_tokens_total":
                        counts.accepted_tokens += sample.value
                    case "accepted_tokens_per_pos_total":
                        counts.per_position[int(sample.labels["position"])] += int(sample.value)
    except (ValueError, KeyError):
        return None
    return counts if found else None


def read_counts(address: ServerAddress) -> DraftCounts | None:
    """Return the counters of the server at ``address``, or None if it has none, or no ``/metrics``."""
    url = f"{'https' if address.tls else 'http'}://{address.host_header}{address.base}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, as for the measured requests
    try:
        with opener.open(urllib.request.Request(url, headers=dict(address.headers)), timeout=TIMEOUT) as response:
            text = response.read().decode()
    except (OSError, ValueError):
        return None
    return parse_counts(text)


def draft_fields(before: DraftCounts | None, after: DraftCounts | None) -> dict[str, Any]:
    """Return the fields of a report, or none if no drafts were verified between the two readings.

    The acceptance rate is a percentage, the acceptance length the mean number of tokens that a verified run gave: the
    accepted ones and one more. The rates by position are shares of the runs.
    """
    if before is None or after is None or after.runs <= before.runs or after.draft_tokens <= before.draft_tokens:
        return {}
    runs = after.runs - before.runs
    drafts, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    positions = range(max(after.per_position, default=-1) + 1)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafts,
        "spec_decode_acceptance_length": 1 + accepted / runs,
        "spec_decode_num_drafts": int(runs),
        "spec_decode_draft_tokens": int(drafts),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            (after.per_position[k] - before.per_position[k]) / runs for k in positions
        ],
    }
