"""The reserve for running requests follows the lengths of answers: exact counts on the simulated engine."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from unittest.mock import patch

import pytest

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler.request_table import FIRST_LENGTH, Reserve
from minisgl.testing.drive import Drive, Job, Report, make_plugin


def serve(num_tokens: int | None, count: int, num_pages: int, vocab_size: int, max_tokens: int) -> Report:
    """Serve ``count`` requests, four of which arrive in each step, and return the report.

    The mean length of an answer that ends with the stop token is ``vocab_size``. ``num_tokens`` is the constant reserve
    for each running request, None the estimate.
    """
    random, spec = Random(0), EngineSpec(16, num_pages, 64, 2048, vocab_size)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [[random.randrange(2, vocab_size) for _ in range(random.randint(8, 48))] for _ in range(count)]
    clients = [Job(uid, prompt, params, arrive=uid // 4) for uid, prompt in enumerate(prompts)]
    plugins = make_plugin("cache", "naive", page_size=16), make_plugin("scheduler", "mixed")
    options = {"max_prefill_tokens": 512, "starvation_steps": 10**6, "eos_ids": (1,), "thorough": False}
    constant = nullcontext() if num_tokens is None else patch.object(Reserve, "num_tokens", num_tokens)
    with constant:
        return Drive(spec, *plugins, **options).run(clients)


def test_short_answers_run_in_larger_batches() -> None:
    """With answers of 12 tokens on average, a reserve of 32 tokens each leaves pages unused."""
    constant, estimate = (serve(n, count=150, num_pages=24, vocab_size=12, max_tokens=300) for n in (32, None))
    assert estimate.steps <= 0.8 * constant.steps
    assert estimate.retractions <= 0.1 * 150


def test_long_answers_are_retracted_less() -> None:
    """With answers of up to 500 tokens, a reserve of 32 tokens each admits requests that are retracted soon."""
    constant, estimate = (serve(n, count=100, num_pages=200, vocab_size=300, max_tokens=500) for n in (32, None))
    assert estimate.retractions <= 0.7 * constant.retractions
    assert estimate.steps <= 1.1 * constant.steps


@pytest.mark.parametrize("length", [8, 12, 2000])
def test_reserve_follows_the_answers(length: int) -> None:
    reserve = Reserve(4096)
    assert reserve.num_tokens == FIRST_LENGTH / 4 == 32
    for _ in range(300):
        reserve.answer_ended(length)
    settled = reserve.num_tokens
    assert abs(settled - length / 4) <= 1
    for _ in range(32):
        reserve.pages_ran_out()
    assert reserve.num_tokens >= 2 * settled
    for _ in range(300):
        reserve.answer_ended(length)
    assert reserve.num_tokens == settled


def test_reserve_has_a_bound() -> None:
    """A thousand retractions, between which no answer ends, once made a number that fits into no page table."""
    spec = EngineSpec(4, 40, 4, 160, 50)
    reserve = Reserve(spec.max_seq_len)
    for _ in range(1000):
        reserve.pages_ran_out()
    assert reserve.num_tokens == spec.max_seq_len
    for _ in range(200):
        reserve.answer_ended(20)
    assert reserve.num_tokens <= 10


def test_aborted_requests_do_not_count() -> None:
    plugins = make_plugin("cache", "naive", page_size=4), make_plugin("scheduler", "mixed")
    drive = Drive(EngineSpec(4, 40, 4, 160, 50), *plugins)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    reserve = drive.scheduler.cache_manager.reserve
    drive.run([Job(1, [1, 2, 3], params, abort=5), Job(2, [4, 5], params, abort=0)])
    assert reserve.mean_length == FIRST_LENGTH
    drive.run([Job(3, [1, 2, 3], params)])
    assert reserve.mean_length == FIRST_LENGTH - (FIRST_LENGTH - 20) / 32
