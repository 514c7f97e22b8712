"""The load of chapter 9: requests for the real scheduler, on a clock that adds the calculated time of each step.

Every run is exact: it prints the same numbers on every machine. The pages of this chapter import these functions; so
can you, from this folder.
"""

import random

import numpy as np

from minisgl.bench.loadgen.arrivals import arrival_times
from minisgl.bench.loadgen.metrics import itls, summarize
from minisgl.chapters.lab.grader.timed_runs import TimedJob, serve
from minisgl.testing.drive import make_plugin

LIMITS = {"ttft": 500, "tpot": 30}
"""Milliseconds to the first token, and mean milliseconds for each further token."""


def requests(times, seed=0):
    """Return a request for each arrival time: a prompt of 100 to 700 tokens, an answer of 50 to 250."""
    rng = random.Random(seed)
    lengths = [(rng.randint(100, 700), rng.randint(50, 250)) for _ in times]
    return [TimedJob(i, at, *both) for i, (at, both) in enumerate(zip(times, lengths, strict=True))]


def report(jobs, policy="mixed"):
    """Serve an open loop: each request arrives at its own time."""
    run = serve(jobs, make_plugin("scheduler", policy), max_prefill_tokens=512)
    return summarize(list(run.records.values()), run.seconds, LIMITS)


def at_rate(rate, count=300):
    """Serve an open loop of ``count`` requests, ``rate`` of them a second on average."""
    return report(requests(arrival_times(count, rate=rate).tolist()))


def closed(clients, count=600):
    """Serve a closed loop: each client sends its next request when it has the answer to the one before."""
    run = serve(requests([0.0] * count), make_plugin("scheduler", "mixed"), max_prefill_tokens=512, clients=clients)
    later = list(run.records.values())[clients:]  # without the first request of each client
    return summarize(later, run.seconds, LIMITS) | {"request_throughput": count / run.seconds}


def show(name, r):
    """Print one line about a run."""
    p50, p99 = r["median_ttft_ms"], r["p99_ttft_ms"]
    print(f"{name:24} {r['request_throughput']:5.1f} answers/s, TTFT p50 {p50:6,.0f} ms, p99 {p99:6,.0f} ms")


def two_classes():
    """Return the requests of a chat (140) and of a nightly job (40 documents that arrive first)."""
    rng = random.Random(4)
    chats = [*(1 + arrival_times(60, rate=10)), *(3 + arrival_times(80, rate=40))]
    talk = [TimedJob(i, float(at), rng.randint(100, 700), rng.randint(20, 120)) for i, at in enumerate(chats)]
    docs = [TimedJob(1000 + i, 0.0, rng.randint(2000, 4000), rng.randint(50, 150), priority=1) for i in range(40)]
    return talk, docs


def classes(policy, chunk):
    """Serve both classes; return the chat's p99 of the TTFT and longest gap in ms, and the documents' progress.

    The progress: how many documents had their prompt completed in the flood, and the second at which all are done.
    """
    talk, docs = two_classes()
    run = serve([*talk, *docs], policy, max_prefill_tokens=chunk)
    people, batch = [run.records[job.uid] for job in talk], [run.records[job.uid] for job in docs]
    ttft = np.percentile([r.ttft for r in people], 99)
    gap = max(gap for r in people for gap in itls(r))
    flood = sum(3 <= r.times[0] < 5 for r in batch)
    return 1e3 * ttft, 1e3 * gap, flood, max(r.end for r in batch)


HEAD = "                    tokens   TTFT p99,   longest   documents     all\n" \
       "policy            per step         ms   gap, ms    in flood  done, s"  # fmt: skip


def print_row(name, chunk, values):
    """Print one row of the table whose head is `HEAD`."""
    print(f"{name:13} {chunk:>11} {{:10,.0f}} {{:10,.0f}} {{:12}} {{:8.1f}}".format(*values))
