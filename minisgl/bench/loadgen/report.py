"""The results of a measurement: the table in the terminal, and the JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MAX_REASONS = 10
"""The largest number of different reasons of failures in the table."""
SPREAD = (("mean", "mean"), ("std", "std"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))
NAMES = {
    "ttft": "TTFT (to the first token)",
    "tpot": "TPOT (per later token)",
    "itl": "ITL (between two events)",
    "e2el": "E2EL (to the last token)",
}


def head(
    chat: bool, model: str, tokenizer: str | None, num_prompts: int | None, point: dict[str, Any]
) -> dict[str, Any]:
    """Return the first fields of a JSON report, with the names of ``vllm bench serve``."""
    backend = "openai-chat" if chat else "openai"
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": num_prompts,
        **point,
    }


def load_text(report: dict[str, Any]) -> str:
    """Return the load of a measurement in words, such as ``8 requests/s``."""
    if report["max_concurrency"] is not None:
        return f"{report['max_concurrency']} clients"
    if "replay_speed" in report:
        return f"replayed, speed {report['replay_speed']:g}"
    rate, burstiness = report["request_rate"], float(report["burstiness"])
    if rate == "inf":
        return "all at once"
    return f"{rate:g} requests/s" + (f", burstiness {burstiness:g}" if burstiness != 1 else "")


def show(reports: Sequence[dict[str, Any]], title: str, console: Console | None = None) -> None:
    """Print one table for each measurement if there are few, or one line for each measurement of a sweep."""
    console = console or Console()
    if len(reports) == 1:
        _show_one(reports[0], title, console)
    else:
        _show_sweep(reports, title, console)
    for report in reports:
        _show_trouble(report, console, f"{load_text(report)}: " if len(reports) > 1 else "")


def _show_one(report: dict[str, Any], title: str, console: Console) -> None:
    table = Table(title=f"{title}: {load_text(report)}")
    table.add_column("")
    table.add_column("", justify="right")
    rows = [
        ("requests completed", f"{report['completed']:,}"),
        ("requests failed", f"{report['failed']:,}"),
        ("seconds", f"{report['duration']:,.2f}"),
        ("prompt tokens (of these from the cache)", _with_cached(report)),
        ("output tokens", f"{report['total_output_tokens']:,}"),
        ("requests per second", f"{report['request_throughput']:,.2f}"),
    ]
    if report["request_goodput"] is not None:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in report["goodput_limits"].items())
        rows.append((f"goodput: requests per second with {limits}", f"{report['request_goodput']:,.2f}"))
    rows += [
        ("output tokens per second", f"{report['output_throughput']:,.1f}"),
        ("tokens per second, prompts included", f"{report['total_token_throughput']:,.1f}"),
        ("most requests in flight", f"{report['max_concurrent_requests']:,}"),
    ]
    if "spec_decode_num_drafts" in report:
        accepted, drafts = report["spec_decode_accepted_tokens"], report["spec_decode_draft_tokens"]
        rows += [
            ("draft tokens, accepted", f"{drafts:,}, {accepted:,} ({report['spec_decode_acceptance_rate']:.1f} %)"),
            ("tokens per verification", f"{report['spec_decode_acceptance_length']:.2f}"),
        ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    latencies = Table(title="Latency in milliseconds")
    latencies.add_column("")
    for name, _ in SPREAD:
        latencies.add_column(name, justify="right")
    for metric, words in NAMES.items():
        latencies.add_row(words, *(_ms(report[f"{key}_{metric}_ms"]) for _, key in SPREAD))
    console.print(latencies)


def _with_cached(report: dict[str, Any]) -> str:
    return f"{report['total_input_tokens']:,} ({report['cached_prompt_tokens']:,})"


def _show_sweep(reports: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    goodput = reports[0]["request_goodput"] is not None
    table = Table(title=title)
    columns = ["completed", "failed", "requests/s", *(["good/s"] if goodput else []), "output tok/s"]
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    latencies = Table(title="Latency in milliseconds, p50 and p99")
    for name in ("", *(name for metric in NAMES for name in (metric.upper(), "p99"))):
        latencies.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for report in reports:
        table.add_row(
            load_text(report),
            f"{report['completed']:,}",
            f"{report['failed']:,}",
            f"{report['request_throughput']:,.2f}",
            *([f"{report['request_goodput']:,.2f}"] if goodput else []),
            f"{report['output_throughput']:,.0f}",
        )
        latencies.add_row(load_text(report), *(_ms(report[f"{p}_{m}_ms"]) for m in NAMES for p in ("p50", "p99")))
    console.print(table)
    console.print(latencies)


def _show_trouble(report: dict[str, Any], console: Console, prefix: str) -> None:
    """Print what a reader has to know before using the numbers."""

    def say(text: str) -> None:
        console.print(f"{prefix}{text}", soft_wrap=True, markup=False, highlight=False)

    if report["interrupted_run"]:
        say(f"Stopped by Ctrl-C: {report['interrupted']} requests were in flight and are not counted.")
    for kind, words in (("warmup_failures", "failed in the warm-up"), ("failures", "failed"), ("wrong", "wrong")):
        for reason, number in list(report[kind].items())[:MAX_REASONS]:
            say(f"{words}: {number:,} × {reason}")
        if (more := len(report[kind]) - MAX_REASONS) > 0:
            say(f"… and {more} other reasons")
    if prefix and "spec_decode_num_drafts" in report:
        rate, length = report["spec_decode_acceptance_rate"], report["spec_decode_acceptance_length"]
        say(f"{rate:.1f} % of {report['spec_decode_draft_tokens']:,} drafts accepted, {length:.2f} tokens each time.")
    if report["tokens_per_event"] > 1.05:
        say(f"An event has {report['tokens_per_event']:.2f} tokens on average: ITL is the time between events.")
    client = report["client"]
    say(
        f"Client: {client['processes']} process(es), at most {client['max_cpu_share']:.0%} of a CPU each; event loop "
        f"{client['p99_loop_lag_ms']:.1f} ms late (p99), requests sent {client['p99_send_delay_ms']:.1f} ms late (p99)."
    )
    for reason in client["limits"]:
        say(f"THE CLIENT WAS THE LIMIT, so the numbers above are not the server's alone: {reason}.")


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def plain_number(value: float) -> float | str:
    """Return a number for JSON, which has no infinity: ``inf`` as text, as ``vllm bench serve`` writes it."""
    return "inf" if math.isinf(value) else value


def write_report(path: Path | None, reports: Sequence[dict[str, Any]], sweep: bool) -> None:
    """Write one JSON object, or a list of objects for a sweep, if a file is given."""
    if path is not None:
        content = list(reports) if sweep else reports[0]
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
