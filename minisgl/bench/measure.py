"""Runs requests through a scheduler and takes the times: of the run, of each token, of what lay between two tokens.

Knows a scheduler and an engine, and neither files nor tables. Requests come at once, or each before a turn of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from minisgl.bench.workload import Ask
from minisgl.config import ConfigError
from minisgl.core import I32, Engine, InvalidRequestError, Output, SamplingParams, Step, StepResult
from minisgl.scheduler.scheduler import Scheduler


@dataclass
class Result:
    """Times in seconds; ``…_tokens`` and ``steps`` are counts."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    inter_token_p50: float
    inter_token_p99: float
    steps: int
    computed_tokens: int
    cached_tokens: int
    cache_hit_rate: float
    retractions: int
    worst_gap_tokens: int
    """The most tokens that were computed between two tokens of one request."""

    def plain(self) -> dict[str, float]:
        return asdict(self)


class Meter:
    """An engine that notes how many tokens had been computed up to each step's end; otherwise the engine it wraps."""

    def __init__(self, engine: Engine):
        self._engine, self.spec = engine, engine.spec
        self.eos_ids: frozenset[int] = getattr(engine, "eos_ids", frozenset())
        self._after: list[int] = []  # tokens computed by steps 0 … i
        self.read = 0  # tokens computed up to the step whose result was read last

    @property
    def computed(self) -> int:
        return self._after[-1] if self._after else 0

    @property
    def steps(self) -> int:
        return len(self._after)

    def launch(self, step: Step) -> None:
        self._after.append(self.computed + len(step.input_ids))
        self._engine.launch(step)

    def result(self) -> StepResult:
        result = self._engine.result()
        self.read = self._after[result.id]
        return result

    def close(self) -> None:
        self._engine.close()


def queue(scheduler: Scheduler, uid: int, prompt: Sequence[int] | I32, params: SamplingParams) -> None:
    """Add a request. Raises `ConfigError` where it is refused: the options are too small for the workload."""
    try:
        scheduler.add_request(uid, prompt, params)
    except InvalidRequestError as error:
        raise ConfigError(f"these options can't serve request {uid} of the workload. {error}") from error


def run(
    scheduler: Scheduler,
    meter: Meter,
    asks: Sequence[Ask],
    params: Callable[[int], SamplingParams],
    *,
    first_uid: int = 0,
    arrive: Callable[[int], int] = lambda i: 0,
    seen: Callable[[int], None] = lambda tokens: None,
) -> tuple[Result, dict[int, list[int]]]:
    """Serve all requests; ``params(i)`` are request i's. Returns the times, and each request's tokens by its index.

    Request i comes before turn ``arrive(i)`` of the scheduler (which must not fall with i), or earlier if there is
    nothing else to do. ``seen`` is called after each turn with the number of tokens that came. Raises `ConfigError`
    where a request is refused, and RuntimeError where it ends in an error.
    """
    before, steps, computed = scheduler.stats(), meter.steps, meter.computed
    turns: list[tuple[float, int, Output]] = []
    came: dict[int, float] = {}
    turn = 0
    prompts = [np.asarray(ask.prompt, np.int32) for ask in asks]  # as a tokenizer's process hands them over
    start = time.perf_counter()
    while len(came) < len(asks) or scheduler.has_work:
        if not scheduler.has_work:
            turn = max(turn, arrive(len(came)))
        while len(came) < len(asks) and arrive(len(came)) <= turn:
            i = len(came)
            came[first_uid + i] = time.perf_counter()
            queue(scheduler, first_uid + i, prompts[i], params(i))
        out = scheduler.step()
        turn += 1
        if out:
            turns.append((time.perf_counter(), meter.read, out))
            seen(len(out.uids))
    seconds = time.perf_counter() - start
    for _, _, out in turns:
        for end in out.finished:
            if end.finish_reason == "error":
                raise RuntimeError(f"request {end.uid - first_uid} failed: {end.error}")

    tokens: dict[int, list[int]] = {i: [] for i in range(len(asks))}
    last: dict[int, tuple[float, int]] = {}
    first, between, worst = [], [], 0
    for now, done, out in turns:
        for uid, token in zip(out.uids, out.tokens, strict=True):
            tokens[uid - first_uid].append(token)
            if uid in last:
                between.append(now - last[uid][0])
                worst = max(worst, done - last[uid][1])
            else:
                first.append(now - came[uid])
            last[uid] = (now, done)
    after = scheduler.stats()
    prompt = sum(len(ask.prompt) for ask in asks)
    made = sum(map(len, tokens.values()))
    cached = after["cached_tokens"] - before["cached_tokens"]
    ttft, inter = np.array(first or [0.0]), np.array(between or [0.0])
    return Result(
        requests=len(asks),
        prompt_tokens=prompt,
        output_tokens=made,
        seconds=seconds,
        output_tokens_per_second=made / seconds,
        total_tokens_per_second=(prompt + made) / seconds,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        inter_token_p50=float(np.percentile(inter, 50)),
        inter_token_p99=float(np.percentile(inter, 99)),
        steps=meter.steps - steps,
        computed_tokens=meter.computed - computed,
        cached_tokens=cached,
        cache_hit_rate=cached / max(prompt, 1),
        retractions=after["retractions"] - before["retractions"],
        worst_gap_tokens=worst,
    ), tokens
