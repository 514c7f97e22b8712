"""``python -m minisgl.bench stages``: shows what each stage, from ``stage=1`` to ``stage=9``, gains on one workload.

Each stage is the real scheduler and engine in this process, with one more idea than the stage before. The counts are
exact and equal on every machine; the seconds are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, writable, write_json
from minisgl.bench.measure import Meter, run
from minisgl.bench.workload import SampleRequest
from minisgl.chapters.ladder.picture import draw
from minisgl.chapters.ladder.recorded import RecordedEngine, outputs
from minisgl.chapters.ladder.workload import LONG_TOKENS, Arrival, without_cache, workload
from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec, SamplingParams, Step, StepResult
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import RankZeroEngine, build_scheduler

STAGES = {
    1: "KV cache",
    2: "batches of 16, static",
    3: "continuous batching",
    4: "pages of 16 tokens",
    5: "radix cache, longest prefix first",
    6: "chunks of 128 in mixed batches",
    7: "overlap and graphs",
    8: "speculation (prompt lookup)",
    9: "two classes (questions before long prompts)",
}


@dataclass(frozen=True)
class Stage:
    """Results of one stage. All fields but ``seconds`` are exact counts."""

    number: int
    name: str
    computed: int
    """Tokens that the model computed."""
    prefilled: int
    """Prompt tokens among the computed tokens."""
    steps: int
    most_running: int
    """Number of requests in the largest step."""
    worst_gap: int
    """Largest number of tokens, of all requests, computed between two consecutive tokens of one request."""
    worst_wait: int
    """Largest number of tokens, of all requests, computed between the arrival of a question and its first token.

    Of the questions that arrive after the first long prompt: those that could wait for a long prompt.
    """
    waits: int
    """Number of results that were read while no later step was launched: then the device waits for the host."""
    decode_steps: int
    """Number of steps with decode rows only. With graphs, each of these steps is a replay."""
    launches: int | None
    """Number of launches of one decode step, or None if it is not known.

    On a CPU, these are the operations of the model; a replay counts as one. On a GPU, these are all kernels and graphs,
    also those that prepare the inputs and sample.
    """
    seconds: float | None

    @property
    def waits_per_step(self) -> float:
        """Share of the steps after which the device waited for the host."""
        return self.waits / self.steps


ROWS: tuple[tuple[str, Callable[[Stage], str], tuple[int, ...]], ...] = (
    ("tokens computed", lambda s: f"{s.computed:,}", (1, 5)),
    ("prefilled tokens", lambda s: f"{s.prefilled:,}", (5,)),
    ("steps", lambda s: f"{s.steps:,}", (2, 3, 4, 8)),
    ("most running", lambda s: f"{s.most_running}", (2, 4)),
    ("worst gap", lambda s: f"{s.worst_gap:,}", (6,)),
    ("worst wait", lambda s: f"{s.worst_wait:,}", (3, 4, 5, 9)),
    ("waits per step", lambda s: f"{s.waits_per_step:.2f}", (7,)),
    ("launches", lambda s: "" if s.launches is None else f"{s.launches:,}", (7,)),
    ("seconds", lambda s: "" if s.seconds is None else f"{s.seconds:.2f}", ()),
)
"""Rows of the table: (name of the count, its text, numbers of the stages that change the count most)."""


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
    "speculation",
    "max_draft_tokens",
    "trace",
    "plugins",
)
"""Options that affect the scheduler; ``--counts`` accepts no other options."""


class LadderMeter(Meter):
    """A `Meter` that also counts the rows of steps, prefilled tokens, decode steps, and waits of the device."""

    def __init__(self, engine: RankZeroEngine):
        super().__init__(engine)
        self.most_rows = self.prefilled = self.decode_steps = self.waits = self._in_flight = 0

    def launch(self, step: Step) -> None:
        self.most_rows = max(self.most_rows, step.rows)
        self.prefilled += int(step.num_scheduled_tokens[step.num_continuing :].sum())
        self.decode_steps += step.num_decode == step.rows
        self._in_flight += 1
        super().launch(step)

    def result(self) -> StepResult:
        self.waits += self._in_flight == 1
        self._in_flight -= 1
        return super().result()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m minisgl.bench stages", description=__doc__)
    add_options(parser, "for every stage")
    parser.add_argument("--only", nargs="+", type=int, choices=list(STAGES), metavar="STAGE", help="only these stages")
    parser.add_argument("--counts", action="store_true", help="only the counts, with an engine that computes nothing")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="draw the counts as SVG")
    add_json(parser)
    args = parse(parser, argv)
    if staged := [word for word in args.options if word.lstrip("+").startswith("stage=")]:
        number = staged[0].partition("=")[2]
        parser.error(f"{staged[0]}: this benchmark measures all stages; choose one with --only {number}")
    with plain_errors("minisgl.bench"):
        report = (count if args.counts else measure)(args.options, args.only or list(STAGES))
    show(report)
    stages = [Stage(**stage) for stage in report["stages"]]
    if args.plot:
        args.plot.write_text(draw(stages, report["without_cache"]), encoding="utf-8")
    write_json(args, report)


def count(
    options: Sequence[str] = (), numbers: Sequence[int] = tuple(STAGES), arrivals: Sequence[Arrival] | None = None
) -> dict[str, Any]:
    """Run the stages with an engine that computes nothing, which takes seconds. Return a report.

    ``arrivals`` are the requests of `workload`, by default all tokens of each.

    The counts equal those of `measure`. Those of stages 8 and 9 depend on the sampled tokens, which are recorded ones
    here.
    ``launches`` and ``seconds`` are None.
    """
    manager, arrivals = PluginManager.load(light=True), arrivals or workload()
    stages = []
    for number in numbers:
        _say(f"stage {number}, {STAGES[number]}: counting {len(arrivals)} requests")
        config = compose(manager, [f"stage={number}", *options])
        _refuse_unused(options)
        if config.num_pages is None or config.max_seq_len is None:  # every stage sets both
            raise ConfigError("--counts uses no model and no memory: set num_pages and max_seq_len to a number.")
        spec = EngineSpec(config.page_size, config.num_pages, config.max_running_requests, config.max_seq_len, 2048)
        stage, _ = serve(config, manager, RecordedEngine(spec, arrivals, outputs()), arrivals, number)
        stages.append(replace(stage, seconds=None))
    return _report(options, {}, arrivals, stages)


def _say(text: str) -> None:
    """Print a line about the progress to standard error, because a stage takes up to minutes."""
    print(f"minisgl.bench stages: {text}", file=sys.stderr, flush=True)


def _refuse_unused(options: Sequence[str]) -> None:
    """Raise `ConfigError` for an option that is not in `COUNTED`: it would have no effect without model and device."""
    for word in options:
        if word.lstrip("+").partition("=")[0].partition(".")[0] not in COUNTED:
            raise ConfigError(
                f"{word}: --counts uses no model and no device, so this option has no effect. Leave out the option or "
                f"--counts. Options that change counts: {', '.join(COUNTED)}."
            )


def measure(options: Sequence[str] = (), numbers: Sequence[int] = tuple(STAGES)) -> dict[str, Any]:
    """Run the stages, one after another, on the real engine. Return a report, which can be written as JSON.

    On a GPU, kernels are compiled and loaded at the first use of a shape. So each stage serves the whole workload once
    with another scheduler before it is timed. The timed scheduler starts with an empty cache. On a CPU, a short run is
    enough.
    """
    from minisgl.bench.launches import launches_of
    from minisgl.bench.offline import machine
    from minisgl.engine.build import start_engine

    manager, arrivals = PluginManager.load(), workload()
    stages, answers = [], []
    for number in numbers:
        config = compose_stage(manager, number, options)
        _say(f"stage {number}, {STAGES[number]}: starting the engine")
        engine = start_engine(config, manager)
        try:
            _say(f"stage {number}: serving {len(arrivals)} requests")
            if engine.device.type == "cuda":
                serve(config, manager, engine, arrivals, number)
            else:
                _warm_up(config, manager, engine)
            stage, tokens = serve(config, manager, engine, arrivals, number)
            _say(f"stage {number}: {stage.seconds:.1f} s")
            eager, replayed = launches_of(engine, config, manager)
            where = machine(str(engine.device), str(engine.dtype).removeprefix("torch."))
        finally:
            engine.close()
        stages.append(replace(stage, launches=replayed or eager))
        answers.append(tokens)
    if eager is not None and replayed is not None:
        # On a CPU, a stage with graphs records and counts the operations. The others launch them one by one.
        stages = [replace(stage, launches=eager) if stage.launches is None else stage for stage in stages]
    same = sum(len(set(map(tuple, each))) == 1 for each in zip(*answers, strict=True))
    return _report(options, where, arrivals, stages) | {"same_answers": same}


def _report(
    options: Sequence[str], where: dict[str, Any], arrivals: Sequence[Arrival], stages: Sequence[Stage]
) -> dict[str, Any]:
    return {
        "options": list(options),
        "machine": where,
        "requests": len(arrivals),
        "without_cache": without_cache([arrival.request for arrival in arrivals]),
        "stages": [asdict(stage) for stage in stages],
    }


def _warm_up(config: Config, manager: PluginManager, engine: RankZeroEngine) -> None:
    """Run one short request, so that libraries are initialized."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    meter = Meter(engine)
    run(build_scheduler(config, manager, meter), meter, [SampleRequest([1] * 32, 4)], lambda i: params)


def compose_stage(manager: PluginManager, number: int, options: Sequence[str] = ()) -> Config:
    """Return the options of a stage. On a GPU, stages 7 to 9 use CUDA graphs."""
    config = compose(manager, [f"stage={number}", *options])
    if number >= 7 and config.device != "cpu" and not any(word.startswith("graph=") for word in options):
        import torch

        if torch.cuda.is_available():
            return compose(manager, [f"stage={number}", "graph=cuda", *options])
    return config


def serve(
    config: Config, manager: PluginManager, engine: RankZeroEngine, arrivals: Sequence[Arrival], number: int
) -> tuple[Stage, list[list[int]]]:
    """Run the workload on the engine of a stage. Return the results, and the output tokens of each request.

    Stage 8 verifies all drafts. A server verifies them only where that is faster, so its counts follow a clock. With a
    policy that uses priorities, the long prompts are less urgent than the questions.
    """
    meter = LadderMeter(engine)
    scheduler = build_scheduler(config, manager, meter, adapt_drafts=False)
    requests = [arrival.request for arrival in arrivals]
    is_long = [len(request.prompt_ids) >= LONG_TOKENS for request in requests]
    classes = is_long if scheduler.planner.uses_priority else [False] * len(requests)
    params = [
        SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True, priority=int(less_urgent))
        for request, less_urgent in zip(requests, classes, strict=True)
    ]
    waits: dict[int, int] = {}
    result, tokens = run(
        scheduler,
        meter,
        requests,
        params.__getitem__,
        arrive=lambda i: arrivals[i].step,
        on_first=waits.__setitem__,
    )
    stage = Stage(
        number=number,
        name=STAGES[number],
        computed=result.computed_tokens,
        prefilled=meter.prefilled,
        steps=result.steps,
        most_running=meter.most_rows,
        worst_gap=result.worst_gap_tokens,
        worst_wait=max((waits[i] for i, long in enumerate(is_long) if not long and any(is_long[:i])), default=0),
        waits=meter.waits,
        decode_steps=meter.decode_steps,
        launches=None,
        seconds=result.seconds,
    )
    return stage, [tokens[i] for i in range(len(requests))]


def _shown_name(stage: Stage, options: Sequence[str]) -> str:
    """Return the name of a stage, without what its own policy adds if the options name another policy."""
    if any(option.startswith("scheduler=") for option in options):
        return stage.name.removesuffix(", static").removesuffix(" in mixed batches")
    return stage.name


def show(report: dict[str, Any]) -> None:
    """Print the stages side by side, with the counts that a stage changes most in bold."""
    stages = [Stage(**stage) for stage in report["stages"]]
    m = report["machine"]
    table = Table(title=f"{report['requests']} requests" + (f" on {m['device']} ({m['dtype']})" if m else ""))
    table.padding = (0, 0, 0, 1)
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
        console.print(f"  {stage.number}  {_shown_name(stage, report['options'])}", highlight=False)
    if report["options"]:
        console.print(f"  with {' '.join(report['options'])}", highlight=False)
    launches = "; launches: of one decode step" if any(s.launches for s in stages) else ""
    console.print(
        "worst gap: tokens computed between two consecutive tokens of an answer.\n"
        "worst wait: tokens computed until a question has the first token of its answer.\n"
        f"waits: the device waits for the host{launches}.\n"
        f"Without a KV cache, {report['without_cache']:,} tokens would be computed (calculated, not measured)."
    )
    if "same_answers" in report:
        console.print(
            f"{report['same_answers']} of {report['requests']} requests have the same output tokens in all stages."
        )
