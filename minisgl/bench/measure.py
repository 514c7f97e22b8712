"""Runs requests through a scheduler, and measures throughput, time to first token, and the gaps between tokens.

Requests arrive at once, or each before a given turn of the scheduler. This module reads no files and prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from minisgl.bench.workload import SampleRequest
from minisgl.config import ConfigError
from minisgl.core import I32, Engine, InvalidRequestError, Output, SamplingParams, Step, StepResult, TokenMasks
from minisgl.scheduler.scheduler import Scheduler


@dataclass
class Result:
    """Counts and times of one run. Times are in seconds; ``ttft`` is the time to the first token."""

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
    """Largest number of tokens, of all requests, computed between two consecutive tokens of one request."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    acceptance_rate: float = 0.0
    """Share of the draft tokens that were accepted; 0 if there were none."""
    tokens_per_step: float = 1.0
    """Mean number of tokens that a decoding request gained in a step that computed it."""

    def plain(self) -> dict[str, float]:
        """Return the fields as a dict, for JSON."""
        return asdict(self)


class Meter:
    """An engine that wraps another and records how many tokens had been computed at the end of each step."""

    def __init__(self, engine: Engine):
        self._engine, self.spec = engine, engine.spec
        self.eos_ids: frozenset[int] = getattr(engine, "eos_ids", frozenset())
        self._computed: list[int] = []  # entry i: tokens computed by steps 0 to i
        self.read = 0  # number of tokens computed by the steps whose result was read

    @property
    def computed(self) -> int:
        """Number of tokens computed by all launched steps."""
        return self._computed[-1] if self._computed else 0

    @property
    def steps(self) -> int:
        """Number of launched steps."""
        return len(self._computed)

    def launch(self, step: Step) -> None:
        self._computed.append(self.computed + len(step.input_ids))
        self._engine.launch(step)

    def sample(self, masks: TokenMasks) -> None:
        self._engine.sample(masks)

    def result(self) -> StepResult:
        result = self._engine.result()
        self.read = self._computed[result.id]
        return result

    def close(self) -> None:
        self._engine.close()


def queue(scheduler: Scheduler, uid: int, prompt: Sequence[int] | I32, params: SamplingParams) -> None:
    """Add a request. Raises `ConfigError` if it is refused, because the options are too small for the workload."""
    try:
        scheduler.add_request(uid, prompt, params)
    except InvalidRequestError as error:
        raise ConfigError(f"these options cannot serve request {uid} of the workload. {error}") from error


def run(
    scheduler: Scheduler,
    meter: Meter,
    requests: Sequence[SampleRequest],
    params: Callable[[int], SamplingParams],
    *,
    first_uid: int = 0,
    arrive: Callable[[int], int] = lambda i: 0,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    on_first: Callable[[int, int], None] = lambda i, tokens: None,
) -> tuple[Result, dict[int, list[int]]]:
    """Serve all requests. Return the measurements, and the output tokens of each request by its index.

    ``params(i)`` are the sampling parameters of request i. Request i arrives before the scheduler's turn number
    ``arrive(i)``, or earlier if the scheduler is idle; ``arrive(i)`` must not decrease with i. ``on_tokens`` is called
    after each turn with the number of new tokens, and ``on_first`` at the end for each request i, with the tokens of
    all requests that were computed between its arrival and its first token. Raises `ConfigError` if a request is
    refused, and RuntimeError if one fails.
    """
    before, steps, computed = scheduler.stats(), meter.steps, meter.computed
    turns: list[tuple[float, int, Output]] = []
    arrived: dict[int, tuple[float, int]] = {}  # uid -> (time, tokens computed)
    turn = 0
    # int32 arrays, as a tokenizer's process sends them
    prompts = [np.asarray(request.prompt_ids, np.int32) for request in requests]
    start = time.perf_counter()
    while len(arrived) < len(requests) or scheduler.has_work:
        if not scheduler.has_work:
            turn = max(turn, arrive(len(arrived)))
        while len(arrived) < len(requests) and arrive(len(arrived)) <= turn:
            i = len(arrived)
            arrived[first_uid + i] = time.perf_counter(), meter.read
            queue(scheduler, first_uid + i, prompts[i], params(i))
        out = scheduler.step()
        turn += 1
        if out:
            turns.append((time.perf_counter(), meter.read, out))
            on_tokens(len(out.uids))
    seconds = time.perf_counter() - start
    for _, _, out in turns:
        for end in out.finished:
            if end.finish_reason == "error":
                raise RuntimeError(f"request {end.uid - first_uid} failed: {end.error}")

    tokens: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    last: dict[int, tuple[float, int]] = {}  # uid -> (time, tokens computed) at its most recent token
    first, between, worst = [], [], 0
    for now, computed_then, out in turns:
        for uid, token in zip(out.uids, out.tokens, strict=True):
            tokens[uid - first_uid].append(token)
            if uid in last:
                between.append(now - last[uid][0])
                worst = max(worst, computed_then - last[uid][1])
            else:
                first.append(now - arrived[uid][0])
                on_first(uid - first_uid, computed_then - arrived[uid][1])
            last[uid] = (now, computed_then)
    after = scheduler.stats()
    prompt = sum(len(request.prompt_ids) for request in requests)
    generated = sum(map(len, tokens.values()))
    cached = after["cached_tokens"] - before["cached_tokens"]
    drafts, accepted, decode_rows = (
        after[name] - before[name] for name in ("draft_tokens", "accepted_draft_tokens", "decode_tokens")
    )
    ttft, inter = np.array(first or [0.0]), np.array(between or [0.0])
    return Result(
        requests=len(requests),
        prompt_tokens=prompt,
        output_tokens=generated,
        seconds=seconds,
        output_tokens_per_second=generated / seconds,
        total_tokens_per_second=(prompt + generated) / seconds,
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
        draft_tokens=drafts,
        accepted_draft_tokens=accepted,
        acceptance_rate=accepted / max(drafts, 1),
        tokens_per_step=1 + accepted / max(decode_rows, 1),
    ), tokens
