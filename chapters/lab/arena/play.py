"""One entry plays the traces of a match: the real scheduler on the simulated engine, with a calculated clock.

``python -m minisgl.chapters.lab.arena.play`` reads a JSON request from its standard input, and writes a JSON line for
each trace: the code of an entry runs in a process of its own. A step takes the seconds that the cost model of
`minisgl.bench.clusters.simulate` gives it. The simulated engine checks every step: an entry that breaks a promise is
out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pluggy

from minisgl import hooks
from minisgl.chapters.lab.arena.traces import Trace, traces_of
from minisgl.chapters.lab.grader.timed_runs import step_seconds
from minisgl.core import EngineSpec, SamplingParams, Step
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.drive import Drive, Job, make_plugin

__all__ = ["BASELINES", "GROUPS", "Played", "play"]

GROUPS = {"policy": "scheduler", "cache": "cache"}
"""What plays → the group of its plugins."""
BASELINES = {
    "policy": ("static", "prefill_first", "decode_first", "mixed", "slo"),
    "cache": ("naive", "radix"),
}
"""Shipped plugins that play in every match. The second name of a score's ratio is `REFERENCE`."""
OWN, OWN_OPTIONS = "own", ("pacing", "sharing", "eviction")
"""A file that has one of the options plays with its value ``own``: the rules with which it beats the lab's number."""
PAGE = 16
MOST_STEPS = 50_000


@dataclass(frozen=True)
class Played:
    """The counts of one entry on one trace. Times are calculated seconds.

    ``wait_per_token``: from a request's arrival to its end, divided by the tokens of its answer, the mean of all
    requests (the normalized latency of Orca, Yu et al. 2022). ``computed`` are prompt tokens that were computed.
    """

    trace: str
    wait_per_token: float
    ttft_p99: float
    worst_gap: float
    seconds: float
    steps: int
    computed: int
    retractions: int


class _LastStep:
    """An observer that keeps the last step."""

    def __init__(self) -> None:
        self.step: Step | None = None

    @hooks.hookimpl
    def minisgl_batch_scheduled(self, step: Step) -> None:
        """Keep the step."""
        self.step = step


def play(trace: Trace, policy: Any, cache: Any) -> Played:
    """Serve a trace. Raise AssertionError if a promise is broken."""
    last = _LastStep()
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(last)
    spec = EngineSpec(PAGE, trace.pages, trace.rows, trace.pages * PAGE, vocab_size=60_000)
    drive = Drive(
        spec, cache, policy, overlap=False, max_prefill_tokens=trace.chunk, observers=manager.hook, thorough=False
    )
    classes = getattr(policy, "uses_priority", False)
    pending, now = sorted(trace.asks, key=lambda ask: (ask.at, ask.uid))[::-1], 0.0
    times: dict[int, list[float]] = {ask.uid: [] for ask in trace.asks}
    ends: dict[int, float] = {}
    while pending or drive.scheduler.has_work:
        if not drive.scheduler.has_work:
            now = max(now, pending[-1].at)
        while pending and pending[-1].at <= now:
            ask = pending.pop()
            stem = [(1009 * ask.stem + 31 * i) % 20_000 for i in range(ask.shared)]
            own = [20_000 + (1511 * ask.uid + 17 * i) % 30_000 for i in range(ask.own)]
            params = SamplingParams(
                max_tokens=ask.answer, temperature=0.0, ignore_eos=True, priority=ask.priority if classes else 0
            )
            drive.add(Job(ask.uid, [*stem, *own], params))
        last.step = None
        output = drive.step()
        now += 0.0 if last.step is None else step_seconds(last.step)
        for uid in output.uids:
            times[uid].append(now)
        ends |= {end.uid: now for end in output.finished}
        assert drive.report.steps <= MOST_STEPS, f"requests are open after {MOST_STEPS:,} steps"
    drive.check_idle()
    gaps = [b - a for each in times.values() for a, b in pairwise(each)]
    firsts = [times[ask.uid][0] - ask.at for ask in trace.asks]
    waits = [(ends[ask.uid] - ask.at) / ask.answer for ask in trace.asks]
    return Played(
        trace.name,
        wait_per_token=float(np.mean(waits)),
        ttft_p99=float(np.percentile(firsts, 99, method="higher")),
        worst_gap=max(gaps, default=0.0),
        seconds=now,
        steps=drive.report.counts.steps,
        computed=drive.report.counts.prompt_tokens,
        retractions=drive.report.retractions,
    )


def build(kind: str, entry: str, file: bool, own: Collection[str] = OWN_OPTIONS) -> Any:
    """Return a function that builds the entry: a shipped plugin's name, or the path of a file.

    The options ``own`` of a file have the value ``own``.
    """
    group = GROUPS[kind]
    given = {"page_size": PAGE} if group == "cache" else {}
    if not file:
        options = {"compare": "numpy"} if entry == "radix" else {}
        return lambda: make_plugin(group, entry, **given, **options)
    manager = PluginManager()
    plugin = manager.add(entry)
    names = [name for each, name, _ in plugin.options if each == group]
    if not names:
        raise ValueError(f"the file has no plugin of the group {group!r}")
    config = manager.make(group, names[0])
    chosen = {f.name: OWN for f in fields(config) if f.name in own}
    return lambda: manager.build(group, replace(config, **chosen), **given)


def answer(request: dict[str, Any]) -> Sequence[Played]:
    """Play one entry on all traces of a match, with a new object for each trace."""
    make, played = build(request["kind"], request["entry"], request["file"]), []
    for trace in traces_of(request["kind"], request["seed"]):
        own = make()
        if request["kind"] == "policy":
            played.append(play(trace, own, make_plugin("cache", "radix", page_size=PAGE, compare="numpy")))
        else:
            played.append(play(trace, make_plugin("scheduler", "mixed"), own))
    return played


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.read())
    channel, sys.stdout = sys.stdout, sys.stderr
    try:
        result: dict[str, Any] = {"played": [asdict(each) for each in answer(request)]}
    except Exception as error:  # also the entry's own exceptions: the entry is out
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        result = {"out": " ".join(text.split())[:300]}
    print(json.dumps(result), file=channel, flush=True)


if __name__ == "__main__":
    main()
