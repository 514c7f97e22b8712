"""``python -m minisgl.bench stages``: one workload through ``stage=1`` … ``stage=7``, and what each stage bought.

Each stage is the real scheduler and engine in this process, one idea further than the stage before. Counts come first:
they are exact, and the same on every machine. Seconds stand beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, writable, write_json
from minisgl.bench.measure import Meter, run
from minisgl.bench.workload import Ask
from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec, SamplingParams, Step, StepResult
from minisgl.course.ladder.picture import draw
from minisgl.course.ladder.workload import Arrival, without_cache, workload
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import RankZeroEngine, build_scheduler
from minisgl.testing.null import NullEngine

STAGES = {
    1: "KV cache",
    2: "batches of 16, static",
    3: "continuous batching",
    4: "pages of 16 tokens",
    5: "radix cache, longest prefix first",
    6: "chunks of 128 in mixed batches",
    7: "overlap and graphs",
}


@dataclass(frozen=True)
class Stage:
    """What one stage came to. All but ``seconds`` are exact counts."""

    number: int
    what: str
    computed: int
    """Tokens that went through the model."""
    prefilled: int
    """Of them, tokens of prompts."""
    steps: int
    most_running: int
    """Requests in the largest step."""
    worst_gap: int
    """The most tokens that were computed between two tokens of one request."""
    waits: int
    """Results that were asked for while nothing was queued behind them: the device then waits for the host."""
    decode_steps: int
    """Steps of decode rows alone; with graphs, each is a replay."""
    launches: int | None
    """What the host launches for one of them. On a CPU: the operations of the model, or their replay, which counts as
    one; on a GPU: every kernel and graph, those of inputs and sampling too. None where nothing recorded them."""
    seconds: float | None

    @property
    def waits_a_step(self) -> float:
        return self.waits / self.steps


ROWS: tuple[tuple[str, Callable[[Stage], str], tuple[int, ...]], ...] = (
    ("tokens computed", lambda s: f"{s.computed:,}", (1, 5)),
    ("prefilled tokens", lambda s: f"{s.prefilled:,}", (5,)),
    ("steps", lambda s: f"{s.steps:,}", (2, 3, 4)),
    ("most running", lambda s: f"{s.most_running}", (2, 4)),
    ("worst gap", lambda s: f"{s.worst_gap:,}", (6,)),
    ("waits a step", lambda s: f"{s.waits_a_step:.2f}", (7,)),
    ("launches", lambda s: "" if s.launches is None else f"{s.launches:,}", (7,)),
    ("seconds", lambda s: "" if s.seconds is None else f"{s.seconds:.2f}", ()),
)
"""The table: a count, how it is written, and the stages that are there to move it."""


COUNTED = (
    "cache",
    "scheduler",
    "page_size",
    "num_pages",
    "max_running_requests",
    "max_seq_len",
    "max_prefill_tokens",
    "overlap",
    "starvation_steps",
    "trace",
    "plugins",
)
"""Options of the scheduler and what it builds: ``--counts`` takes no others."""


class Watch(Meter):
    """A `Meter` that also sees how large steps are, and whether the device had more to do when a result was read."""

    def __init__(self, engine: RankZeroEngine):
        super().__init__(engine)
        self.most_rows = self.prefilled = self.decode_steps = self.waits = self._unread = 0

    def launch(self, step: Step) -> None:
        self.most_rows = max(self.most_rows, step.rows)
        self.prefilled += len(step.input_ids) - step.num_decode
        self.decode_steps += step.num_decode == step.rows
        self._unread += 1
        super().launch(step)

    def result(self) -> StepResult:
        self.waits += self._unread == 1
        self._unread -= 1
        return super().result()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench stages", description=__doc__)
    add_options(parser, "for every stage")
    parser.add_argument("--only", nargs="+", type=int, choices=list(STAGES), metavar="STAGE", help="not all seven")
    parser.add_argument("--counts", action="store_true", help="counts alone, over an engine without a model")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="draw the counts as SVG")
    add_json(parser)
    args = parse(parser, argv)
    if staged := [word for word in args.options if word.lstrip("+").startswith("stage=")]:
        number = staged[0].partition("=")[2]
        parser.error(f"{staged[0]}: the stages are what this measures, one after another; choose with --only {number}")
    with plain_errors("minisgl.bench"):
        report = (count if args.counts else measure)(args.options, args.only or list(STAGES))
    show(report)
    stages = [Stage(**stage) for stage in report["stages"]]
    if args.plot:
        args.plot.write_text(draw(stages, report["without_cache"]), encoding="utf-8")
    write_json(args, report)


def count(options: Sequence[str] = (), numbers: Sequence[int] = tuple(STAGES)) -> dict[str, Any]:
    """The stages over an engine that computes nothing: the same counts in seconds, since they do not depend on which
    tokens are sampled. What only an engine knows is None."""
    manager, arrivals = PluginManager.load(light=True), workload()
    stages = []
    for number in numbers:
        config = compose(manager, [f"stage={number}", *options])
        _refuse_unseen(options)
        if config.num_pages is None or config.max_seq_len is None:  # every stage says both
            raise ConfigError("--counts has no model and no memory to go by: give num_pages and max_seq_len a number.")
        spec = EngineSpec(config.page_size, config.num_pages, config.max_running_requests, config.max_seq_len, 2048)
        stage, _ = serve(config, manager, NullEngine(spec), arrivals, number)
        stages.append(replace(stage, seconds=None))
    return _report(options, {}, arrivals, stages)


def _refuse_unseen(options: Sequence[str]) -> None:
    """Raise `ConfigError` for an option that would change no count."""
    for word in options:
        if word.lstrip("+").partition("=")[0].partition(".")[0] not in COUNTED:
            raise ConfigError(
                f"{word}: --counts is without model and device, and would print the same. Leave it out, or --counts. "
                f"What can be counted: {', '.join(COUNTED)}."
            )


def measure(options: Sequence[str] = (), numbers: Sequence[int] = tuple(STAGES)) -> dict[str, Any]:
    """The stages, one after another, on the real engine; a report that JSON can hold.

    On a GPU kernels are compiled and loaded when their shapes first come, so each stage serves the whole workload once
    before it is timed, by a scheduler of its own: the cache is cold again after it. On a CPU a short run has to do.
    """
    from minisgl.bench.launches import launches_of
    from minisgl.bench.offline import machine
    from minisgl.engine.followers import start_engine

    manager, arrivals = PluginManager.load(), workload()
    stages, answers = [], []
    for number in numbers:
        config = compose_stage(manager, number, options)
        engine = start_engine(config, manager)
        try:
            if engine.device.type == "cuda":
                serve(config, manager, engine, arrivals, number)
            else:
                _warm(config, manager, engine)
            stage, tokens = serve(config, manager, engine, arrivals, number)
            eager, replayed = launches_of(engine, config, manager)
            where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
        finally:
            engine.close()
        stages.append(replace(stage, launches=replayed or eager))
        answers.append(tokens)
    if eager is not None and replayed is not None:
        # On a CPU: what was recorded for the last stage, the others do one by one.
        stages[:-1] = [replace(stage, launches=eager) for stage in stages[:-1]]
    same = sum(len(set(map(tuple, each))) == 1 for each in zip(*answers, strict=True))
    return _report(options, where, arrivals, stages) | {"same_answers": same}


def _report(
    options: Sequence[str], where: dict[str, Any], arrivals: Sequence[Arrival], stages: Sequence[Stage]
) -> dict[str, Any]:
    return {
        "options": list(options),
        "machine": where,
        "requests": len(arrivals),
        "without_cache": without_cache([arrival.ask for arrival in arrivals]),
        "stages": [asdict(stage) for stage in stages],
    }


def _warm(config: Config, manager: PluginManager, engine: RankZeroEngine) -> None:
    """A short run, in which libraries set themselves up."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    meter = Meter(engine)
    run(build_scheduler(config, manager, meter), meter, [Ask([1] * 32, 4)], lambda i: params)


def compose_stage(manager: PluginManager, number: int, options: Sequence[str] = ()) -> Config:
    """The options of a stage; on a GPU, the graphs of the last one are CUDA's."""
    config = compose(manager, [f"stage={number}", *options])
    if number == 7 and config.device != "cpu" and not any(word.startswith("graph=") for word in options):
        import torch

        if torch.cuda.is_available():
            return compose(manager, [f"stage={number}", "graph=cuda", *options])
    return config


def serve(
    config: Config, manager: PluginManager, engine: RankZeroEngine, arrivals: Sequence[Arrival], number: int
) -> tuple[Stage, list[list[int]]]:
    """Run the workload on a stage's engine; its counts, and each request's answer."""
    watch = Watch(engine)
    scheduler = build_scheduler(config, manager, watch)
    params = [SamplingParams(max_tokens=a.ask.output, temperature=0.0, ignore_eos=True) for a in arrivals]
    asks = [arrival.ask for arrival in arrivals]
    result, tokens = run(scheduler, watch, asks, params.__getitem__, arrive=lambda i: arrivals[i].step)
    stage = Stage(
        number=number,
        what=STAGES[number],
        computed=result.computed_tokens,
        prefilled=watch.prefilled,
        steps=result.steps,
        most_running=watch.most_rows,
        worst_gap=result.worst_gap_tokens,
        waits=watch.waits,
        decode_steps=watch.decode_steps,
        launches=None,
        seconds=result.seconds,
    )
    return stage, [tokens[i] for i in range(len(asks))]


def show(report: dict[str, Any]) -> None:
    """The stages side by side; what a stage moved most stands out."""
    stages = [Stage(**stage) for stage in report["stages"]]
    m = report["machine"]
    table = Table(title=f"{report['requests']} requests" + (f" on {m['device']} ({m['dtype']})" if m else ""))
    table.add_column("stage")
    for stage in stages:
        table.add_column(str(stage.number), justify="right")
    for name, value, moved in ROWS:
        cells = [value(stage) for stage in stages]
        if not any(cells):
            continue
        table.add_row(
            name, *(f"[bold]{c}[/bold]" if s.number in moved else c for s, c in zip(stages, cells, strict=True))
        )
    console = Console()
    console.print(table)
    for stage in stages:
        console.print(f"  {stage.number}  {stage.what}", highlight=False)
    if report["options"]:
        console.print(f"  with {' '.join(report['options'])}", highlight=False)
    launched = "; launches: of one decode step" if any(s.launches for s in stages) else ""
    console.print(
        f"worst gap: in tokens; waits: of the device for the host{launched}.\n"
        f"Without a KV cache, {report['without_cache']:,} tokens would be computed (on paper)."
    )
    if "same_answers" in report:
        console.print(f"{report['same_answers']} of {report['requests']} answers are the same tokens in all stages.")
