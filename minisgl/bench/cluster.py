"""``python -m minisgl.bench cluster``: routing policies for several replicas, by hit rate, load balance and TTFT.

Requests with shared prefixes, of a trace or made up, are played to simulated replicas: the real scheduler and prefix
cache without a model, on a clock that only counts. A router's view of them is their KV events. The time of a step is a
sum of costs, which the result contains. The first row of each number of replicas is one server with the pools of all
replicas as one cache, as fast as all of them: the hit rate that routing can reach. With --servers, the requests are
played to real servers instead.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minisgl.bench.arguments import add_json, add_options, parse, writable, write_json
from minisgl.bench.clusters import requests as prepared
from minisgl.bench.clusters.plot import draw
from minisgl.bench.clusters.results import GOAL, ONE_CACHE, Row, compare, show, summarize
from minisgl.bench.clusters.servers import Play
from minisgl.bench.clusters.simulate import H200_14B, H200_14B_POOL, build_replicas, simulate
from minisgl.bench.loadgen.http import ServerAddress
from minisgl.bench.loadgen.measure import SEED_STEP, ask_model
from minisgl.bench.loadgen.prompts import PromptFactory
from minisgl.bench.loadgen.traces import HASH_BLOCK, TraceRequest, within
from minisgl.bench.loadgen.vocabulary import find_tokenizer, vocabulary
from minisgl.cluster.options import ClusterConfig
from minisgl.cluster.routing import RoutingPolicy
from minisgl.config import Config, ConfigError
from minisgl.options.compose import compose, plain_errors, split_plugins
from minisgl.plugin_manager.manager import PluginManager

POLICIES = ("round_robin", "least_loaded", "cache_aware")
SIMULATED = ("cache", "scheduler", "max_prefill_tokens", "max_running_requests")
"""The options of minisgl that a simulated replica has."""
MADE_UP_REQUESTS, MADE_UP_POOL, MADE_UP_RATE = 400, 60_000, 1.0
TRACE_RATE = 0.4
"""Requests a second for each replica: with Mooncake's conversations, one H200 is busy for about half of the time."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench cluster", description=__doc__)
    add_options(p, "for the policies (routing.…=…, plugins=…) and for simulated replicas: " + ", ".join(SIMULATED))
    p.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format (default: made up)")
    p.add_argument("--requests", type=int, help=f"number of requests (default: the trace, or {MADE_UP_REQUESTS})")
    p.add_argument("--replicas", type=int, nargs="+", help="numbers of replicas (default 1 2 4 8)")
    p.add_argument("--routing", nargs="+", default=list(POLICIES), metavar="NAME", help="the policies (default all)")
    p.add_argument("--rate", type=float, help=f"requests a second for each replica (default {TRACE_RATE:g}, or "
                   f"{MADE_UP_RATE:g} made-up ones)")  # fmt: skip
    p.add_argument("--pool", type=int, metavar="TOKENS", help="KV pool of a replica (default "
                   f"{H200_14B_POOL:,}, or {MADE_UP_POOL:,} for made-up requests)")  # fmt: skip
    p.add_argument("--block", type=int, default=HASH_BLOCK, metavar="TOKENS", help="length of a prefix block: all "
                   f"lengths are multiplied by this number / {HASH_BLOCK} (default {HASH_BLOCK})")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="random seed of made-up requests and of tokens (default 0)")
    p.add_argument("--servers", nargs="+", metavar="URL", help="real servers to which the requests are played")
    p.add_argument("--kv-events", nargs="+", default=[], metavar="ADDRESS", help="addresses of the servers' KV "
                   "events, in the same order (default: the view is what was sent to a server)")  # fmt: skip
    p.add_argument("--page-size", type=int, default=16, help="page_size of the servers (default 16)")
    p.add_argument("--vocab-size", type=int, metavar="N", help="tokens of the servers' vocabulary (default: that of "
                   "the model, if minisgl ships it)")  # fmt: skip
    add_json(p)
    p.add_argument("--plot", type=writable, metavar="FILE", help="draw the results as an SVG file")
    return p


@dataclass(frozen=True)
class Setup:
    """What all runs have in common. ``policies`` are the options of each policy, by name."""

    args: argparse.Namespace
    manager: PluginManager
    config: Config
    policies: dict[str, Any]
    entries: list[TraceRequest]
    left_out: int
    rate: float
    pool: int

    def policy(self, name: str) -> RoutingPolicy:
        """Return a new policy."""
        policy: RoutingPolicy = self.manager.build("routing", self.policies[name])
        return policy

    def speed(self, rate: float) -> float:
        """Return the factor by which the requests must arrive faster, so that ``rate`` of them arrive a second."""
        span = (self.entries[-1].timestamp or 0.0) - (self.entries[0].timestamp or 0.0)
        return rate * span / len(self.entries) if span > 0 else 1.0


def main(argv: Sequence[str]) -> None:
    args = parse(parser(), argv)
    begin = time.process_time()
    with plain_errors("minisgl.bench"):
        setup = prepare(args)
        rows, facts = play_to_servers(setup) if args.servers else simulate_all(setup)
    title = f"{len(setup.entries):,} requests, {setup.rate:g} a second for each replica"
    show(rows, title)
    for line in facts["notes"]:
        print(line)
    report = {"options": args.options, "requests": len(setup.entries), "left_out": setup.left_out, **facts}
    report |= {"rate_per_replica": setup.rate, "cpu_seconds": time.process_time() - begin}
    chosen = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    chosen = {key: value for key, value in chosen.items() if key not in ("options", "json", "plot")}
    write_json(args, {**report, "arguments": chosen, "rows": [row.plain() for row in rows]})
    if args.plot is not None:
        args.plot.write_text(draw(rows, title) + "\n", encoding="utf-8")
    if any(row.failed for row in rows):
        raise SystemExit(1)


def prepare(args: argparse.Namespace) -> Setup:
    """Return the checked arguments with the requests. Raise `ConfigError`."""
    check(args)
    manager = PluginManager.load()
    config, policies = options(manager, args)
    made = args.trace is None
    pool = args.pool or (MADE_UP_POOL if made else H200_14B_POOL) * args.block // HASH_BLOCK
    if made:
        entries = prepared.made_up(args.requests or MADE_UP_REQUESTS, args.seed, args.block)
    else:
        entries = prepared.read(args.trace, args.block)
    limit = ask_limit(args, pool) if args.servers else pool // args.block * args.block
    fitting = within(entries, limit)
    if not fitting:
        raise ConfigError(f"no request has {limit:,} tokens or fewer: raise --pool, or lower --block.")
    chosen = fitting[: args.requests]
    rate = args.rate or (MADE_UP_RATE if made else TRACE_RATE)
    return Setup(args, manager, config, policies, chosen, len(entries) - len(fitting), rate, pool)


def check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if an argument is out of range, or two of them exclude each other."""
    for name in ("requests", "pool", "block", "page_size", "vocab_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1.")
    if args.rate is not None and not (0 < args.rate < math.inf):
        raise ConfigError(f"--rate {args.rate:g}: must be a number above 0.")
    if args.replicas and min(args.replicas) < 1:
        raise ConfigError("--replicas: must be at least 1.")
    if args.servers and args.replicas:
        raise ConfigError("--replicas is for the simulation: with --servers, there are as many as URLs.")
    if args.pool is not None and args.servers and args.kv_events:
        raise ConfigError("--pool: with --kv-events, the servers say what they have cached.")
    if not args.servers and (args.kv_events or args.vocab_size or args.page_size != 16):
        raise ConfigError("--kv-events, --page-size and --vocab-size are for --servers.")
    if args.kv_events and len(args.kv_events) != len(args.servers or ()):
        raise ConfigError("--kv-events: give one address for each URL of --servers.")


def ask_limit(args: argparse.Namespace, pool: int) -> int:
    """Return the largest number of tokens of a request that the first server takes."""
    _, max_len = ask_model(ServerAddress.parse(args.servers[0]))
    return max_len or pool


def options(manager: PluginManager, args: argparse.Namespace) -> tuple[Config, dict[str, Any]]:
    """Return the options of the replicas, and those of each policy by name. Raise `ConfigError`.

    An option ``routing.x`` is for each policy that has it.
    """
    named, words = split_plugins(args.options)
    for name in named:
        manager.add(name)
    keys = [word.partition("=")[0] for word in words]
    own = [word for word, key in zip(words, keys, strict=True) if key.startswith("routing.")]
    rest = [word for word in words if word not in own]
    if wrong := [w for w in rest if args.servers or w.partition("=")[0].partition(".")[0] not in SIMULATED]:
        where = "real servers have options of their own" if args.servers else f"use {', '.join(SIMULATED)}, routing.…"
        raise ConfigError(f"{wrong[0]}: bench cluster has no use for this option: {where}.")
    has = {name: {f"routing.{f.name}" for f in fields(manager.schema("routing", name))} for name in args.routing}
    policies = {}
    for name in args.routing:
        mine = [word for word in own if word.partition("=")[0] in has[name]]
        policies[name] = compose(manager, [f"routing={name}", *mine], ClusterConfig).routing
    for word in own:
        if not any(word.partition("=")[0] in keys for keys in has.values()):
            raise ConfigError(f"{word}: none of the policies {', '.join(args.routing)} has this option.")
    config = compose(manager, rest)
    for name in policies:
        manager.build("routing", policies[name])  # raises ConfigError for a wrong value before the first run
    return config, policies


# ---- the simulation --------------------------------------------------------------------------------------


def simulate_all(setup: Setup) -> tuple[list[Row], dict[str, Any]]:
    """Simulate every policy with every number of replicas. Return the rows, and what the report says of them."""
    args, block = setup.args, setup.args.block
    requests = prepared.prepare(setup.entries, block)
    numbers = args.replicas or [1, 2, 4, 8]
    names = [ONE_CACHE, *args.routing]
    rows: list[Row] = []
    with tqdm(total=len(requests) * len(names) * len(numbers), unit="req", disable=None, leave=False) as bar:
        for count in numbers:
            found = []
            for name in names:
                whole = name == ONE_CACHE
                bar.set_description(f"{count} replicas, {name}")
                policy = setup.policy(args.routing[0] if whole else name)
                longest = max(request.prompt_tokens + request.output_tokens for request in requests)
                replicas = build_replicas(setup.manager, setup.config, count, block, setup.pool, longest, whole)
                served = simulate(requests, policy, replicas, setup.speed(setup.rate * count), bar.update)
                found.append(summarize(name, count, served))
                if whole:
                    found[0].max_mean_requests = found[0].max_mean_tokens = 1.0
                    found[0].requests_by_replica = [len(served)]
            compare(found)
            rows += found
    unlimited = prepared.unlimited_hit_rate(requests)
    notes = [
        f"A cache without a limit would have {unlimited:.1%} of the prompt tokens.",
        f"Seconds of a step (Qwen3-14B on one H200): {', '.join(f'{k} {v:g}' for k, v in asdict(H200_14B).items())}.",
        f"KV pool: {setup.pool:,} tokens a replica. Goal: {GOAL.text}.",
    ]
    return rows, {
        "notes": notes,
        "unlimited_hit_rate": unlimited,
        "pool_tokens": setup.pool,
        "step_cost_seconds": asdict(H200_14B),
        "goal": asdict(GOAL),
    }


# ---- real servers ----------------------------------------------------------------------------------------


def play_to_servers(setup: Setup) -> tuple[list[Row], dict[str, Any]]:
    """Play the requests to real servers with every policy. Return the rows, and what the report says of them."""
    args, count = setup.args, len(setup.args.servers)
    addresses = [ServerAddress.parse(url) for url in args.servers]
    model, _ = ask_model(addresses[0])
    tokenizer = find_tokenizer(None, model)
    if tokenizer is None and args.vocab_size is None:
        raise ConfigError(f"the vocabulary of {model} is not known: give --vocab-size N.")
    words = vocabulary(tokenizer, args.vocab_size, text=False)
    play = Play(addresses, args.kv_events, model, args.page_size, setup.pool // args.page_size)
    salt, rows, failures = time.time_ns(), [], []
    with tqdm(total=len(setup.entries) * len(args.routing), unit="req", disable=None, leave=False) as bar:
        for number, name in enumerate(args.routing):
            bar.set_description(name)
            # Every policy gets new prompts, so that none finds those of another in the caches.
            prompts = PromptFactory(words, args.seed + salt + SEED_STEP * number, block_size=args.block)
            speed = setup.speed(setup.rate * count)
            served, failed = play.run(setup.entries, prompts, setup.policy(name), speed, bar.update)
            failures += failed
            if not served:
                raise ConfigError(f"every request failed: {failed[0]}")
            rows.append(summarize(name, count, served, len(failed)))
    unlimited = prepared.unlimited_hit_rate(prepared.prepare(setup.entries, args.block))
    view = "their KV events" if args.kv_events else "what was sent to them"
    notes = [
        f"A cache without a limit would have {unlimited:.1%} of the prompt tokens, in blocks of {args.block} tokens.",
        f"{model} on {count} servers; the router's view: {view}.",
        *(f"{len(failures)} requests failed, the first one: {failures[0]}" for _ in failures[:1]),
    ]
    return rows, {"notes": notes, "unlimited_hit_rate": unlimited, "model": model}


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
