"""``python -m minisgl.bench speculation``: what speculative decoding gains or costs, by acceptance and requests.

The drafts are arbitrary, and an independent coin accepts each with the given probability, so no data set is needed. In
the row *no match*, the proposer `speculation=ngram` is asked, but its drafts are dropped, as if it had found none. One
engine serves all rows.
Every row is run several times, in turns with the others, and each of its times is compared with that of the row *none*
of the same round. The first round does not count: in it, kernels are loaded, and each row's scheduler measures the
steps on which its number of drafts depends.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.measure import Meter, Result, run
from minisgl.bench.offline import machine
from minisgl.bench.synthetic import SyntheticProposer, force_acceptance
from minisgl.bench.workload import parse_range, random_requests
from minisgl.config import Config, ConfigError
from minisgl.core import Req, SamplingParams
from minisgl.engine.build import start_engine
from minisgl.engine.engine import TorchEngine
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.speculation import DraftProposer
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import Scheduler

NONE, NO_MATCH = "none", "no match"


class Goal(NamedTuple):
    """A goal for a row: ``value`` output tokens per second, or ``value`` times those without drafts."""

    value: float
    relative: bool = True

    @property
    def text(self) -> str:
        """The goal in words."""
        return f"≥ {self.value:.2f} × none" if self.relative else f"≥ {self.value:,.0f} tok/s"


RELATIVE_GOALS = {NO_MATCH: 0.98, "0 %": 0.95}
"""By name of a row. Any other row must not be slower than without drafts."""
ONE_REQUEST_14B = 350.0
"""Goal in tokens per second of one request on the shape of Qwen3-14B with an acceptance of 80 %, on one H200."""


@dataclass
class Row:
    """One row of the table: ``requests`` requests with a proposer and an acceptance.

    ``relative`` has, for each round, the throughput divided by that of the row *none*.
    """

    name: str
    requests: int
    acceptance: float | None = None
    goal: Goal | None = None
    results: list[Result] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Median of the output tokens per second."""
        return statistics.median(result.output_tokens_per_second for result in self.results)

    @property
    def ratio(self) -> float:
        """Median of the throughput relative to no drafts."""
        return statistics.median(self.relative)

    def reached(self) -> bool:
        """Return whether the goal was reached. A row without a goal reaches it."""
        if self.goal is None:
            return True
        return (self.ratio if self.goal.relative else self.throughput) >= self.goal.value

    def plain(self) -> dict[str, Any]:
        """Return the row as a dict, for JSON."""
        return {
            "name": self.name,
            "requests": self.requests,
            "acceptance": self.acceptance,
            "output_tokens_per_second": self.throughput,
            "relative": self.ratio,
            "goal": self.goal and self.goal.text,
            "reached": self.reached(),
            "rounds": [asdict(result) for result in self.results],
        }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench speculation", description=__doc__)
    add_options(p, "as for `python -m minisgl`")
    p.add_argument("--requests", type=int, nargs="+", default=[1, 64], help="numbers of requests (default 1 64)")
    p.add_argument(
        "--acceptance", type=float, nargs="*", default=[0.0, 0.5, 0.8], help="probabilities (default 0 0.5 0.8)"
    )
    p.add_argument("--drafts", type=int, default=4, help="largest number of drafts of a request (default 4)")
    p.add_argument("--fixed-drafts", action="store_true", help="always verify as many drafts as possible")
    p.add_argument("--input", default="128", metavar="LOW:HIGH", help="prompt lengths in tokens (default 128)")
    p.add_argument("--output", default="512", metavar="LOW:HIGH", help="output lengths in tokens (default 512)")
    p.add_argument("--rounds", type=int, default=3, help="runs of each row that count (default 3)")
    p.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 (the default) is greedy")
    p.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    add_json(p)
    return p


def main(argv: Sequence[str]) -> None:
    args = parse(parser(), argv)
    with plain_errors("minisgl.bench"):
        rows, where = measure(args)
    show(rows, where, args)
    report = {"options": args.options, "machine": where, "rows": [row.plain() for row in rows]}
    write_json(args, {**report, "workload": {k: v for k, v in vars(args).items() if k not in ("options", "json")}})


def measure(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Run all rows. Return them, and the description of the machine."""
    check(args)
    manager = PluginManager.load()
    config = compose(manager, ["speculation=ngram", *args.options])
    none = replace(config, speculation=compose(manager, ["speculation=none"]).speculation)
    engine = start_engine(config, manager)
    console = Console(stderr=True)
    try:
        where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
        rows = list(table_rows(args, config))
        served = [_Served(row, args, config if row.name == NO_MATCH else none, manager, engine) for row in rows]
        for number in range(1 + args.rounds):
            plain = 0.0
            for each in served:
                result = each.run(number)
                plain = result.output_tokens_per_second if each.row.name == NONE else plain
                name = f"round {number}: {each.row.requests} requests, {each.row.name}"
                counts = f"{result.tokens_per_step:.2f} tokens a step, {result.draft_tokens:,} drafts"
                console.print(f"{name}: {result.output_tokens_per_second:,.1f} tok/s, {counts}", highlight=False)
                if number:
                    each.row.results.append(result)
                    each.row.relative.append(result.output_tokens_per_second / plain)
    finally:
        manager.close()
        engine.close()
    return rows, where


def check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if an argument is out of range."""
    for name in ("drafts", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be at least 1.")
    if not args.requests or min(args.requests) < 1:
        raise ConfigError("--requests: must be at least 1.")
    for acceptance in args.acceptance:
        if not 0.0 <= acceptance <= 1.0:
            raise ConfigError(f"--acceptance {acceptance}: must be between 0 and 1.")


def table_rows(args: argparse.Namespace, config: Config) -> Iterator[Row]:
    """Yield the rows of the table without results. The row *none* is the first one of each number of requests."""
    for requests in args.requests:
        yield Row(NONE, requests)
        for acceptance in args.acceptance:
            name = f"{100 * acceptance:g} %"
            goal = Goal(RELATIVE_GOALS.get(name, 1.0))
            if requests == 1 and name == "80 %" and config.model == "qwen3-14b":
                goal = Goal(ONE_REQUEST_14B, relative=False)
            yield Row(name, requests, acceptance, goal)
        yield Row(NO_MATCH, requests, goal=Goal(RELATIVE_GOALS[NO_MATCH]))


class _NoMatch(DraftProposer):
    """Asks another proposer, and drops its drafts."""

    def __init__(self, proposer: DraftProposer):
        self.proposer, self.max_drafts = proposer, proposer.max_drafts

    def admitted(self, req: Req) -> None:
        self.proposer.admitted(req)

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        self.proposer.advanced(reqs, tokens)

    def removed(self, req: Req) -> None:
        self.proposer.removed(req)

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return no drafts."""
        self.proposer.propose(reqs, positions, limits)
        return [()] * len(reqs)


class _Served:
    """A row with its scheduler, which keeps its measured times of steps from round to round."""

    def __init__(
        self,
        row: Row,
        args: argparse.Namespace,
        config: Config,
        manager: PluginManager,
        engine: TorchEngine,
    ):
        self.row, self.args, self.engine = row, args, engine
        self.meter = Meter(engine)
        proposer: DraftProposer | None = None
        if row.acceptance is not None:
            proposer = SyntheticProposer(engine.spec, args.drafts)
        elif row.name == NO_MATCH:
            proposer = _NoMatch(manager.build("speculation", config.speculation, spec=engine.spec))
        adapt = not args.fixed_drafts
        self.scheduler: Scheduler = build_scheduler(config, manager, self.meter, proposer=proposer, adapt_drafts=adapt)

    def run(self, number: int) -> Result:
        """Run the row in round ``number``, with prompts of its own."""
        args, seed = self.args, self.args.seed + 1000 * number
        force_acceptance(self.engine, self.row.acceptance, seed)
        lengths = parse_range(args.input), parse_range(args.output)
        requests = random_requests(self.row.requests, *lengths, self.engine.spec.vocab_size, seed)
        params = [
            SamplingParams(max_tokens=request.output_len, temperature=args.temperature, seed=seed + i, ignore_eos=True)
            for i, request in enumerate(requests)
        ]
        result, _ = run(self.scheduler, self.meter, requests, params.__getitem__, first_uid=1_000_000 * number)
        return result


def show(rows: Sequence[Row], where: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table."""
    title = f"{args.drafts} drafts at most, on {where['device']} ({where['dtype']}, torch {where['torch']})"
    table = Table(title=title)
    for name in ("requests", "acceptance", "tok/s", "of none", "tokens a step", "accepted", "ms a step", "goal", ""):
        table.add_column(name, justify="left" if name in ("acceptance", "goal", "") else "right")
    for row in rows:
        steps = sum(result.steps for result in row.results)
        drafts = sum(result.draft_tokens for result in row.results)
        accepted = sum(result.accepted_draft_tokens for result in row.results)
        table.add_row(
            str(row.requests),
            row.name,
            f"{row.throughput:,.1f}",
            f"{row.ratio:.3f}",
            f"{statistics.median(result.tokens_per_step for result in row.results):.2f}",
            f"{accepted / drafts:.1%} of {drafts:,}" if drafts else "no drafts",
            f"{1e3 * sum(result.seconds for result in row.results) / steps:.2f}",
            row.goal.text if row.goal else "",
            "" if row.goal is None else "reached" if row.reached() else "MISSED",
        )
    Console(width=120).print(table)
