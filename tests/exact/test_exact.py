"""``exact=true``: answers are equal bit by bit in all compositions of requests, on a CPU (promise 8)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from minisgl import LLM
from minisgl.config import ConfigError
from minisgl.engine.gumbel import Param, draw, token_hashes
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.kernels.converted import exact
from minisgl.plugins.kernels.converted.cpu_layers import CpuDecoderLayers
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.exact import Composition, Exactness, compositions, example_requests

EXAMPLES = int(os.environ.get("MINISGL_COMPOSITIONS", "250"))
"""Random compositions for each of two sizes of pages."""


SMALL = ("max_running_requests=5", "max_seq_len=96", "max_draft_tokens=3")
POOLS = {"pages of 16": ("page_size=16", "num_pages=9"), "pages of 3": ("page_size=3", "num_pages=45")}


RETRACTED = Composition(((11, 5, None), (11, 5, None)), choice=4, overlap=False, max_prefill_tokens=16)
"""Two long answers that together do not fit into the smaller pool."""


def engine(*words: str) -> Exactness:
    return Exactness(["device=cpu", "exact=true", *SMALL, *words], example_requests())


@pytest.fixture(scope="module", params=POOLS)
def exactness(request: pytest.FixtureRequest) -> Iterator[Exactness]:
    made = engine("model=tutor", *POOLS[request.param])
    yield made
    made.close()


def check_all(exactness: Exactness, examples: int, needed: Sequence[str]) -> None:
    """Check ``examples`` random compositions, and that what ``needed`` names happened in them.

    A composition that breaks the promise is not shrunk: it is printed, and a planted fault would take longer to shrink
    than to find.
    """

    @settings(max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(compositions(len(exactness.requests)))
    def check(composition: Composition) -> None:
        exactness.check(composition)

    check()
    assert exactness.seen["runs"] >= examples
    assert all(exactness.seen[name] for name in needed), exactness.seen


def test_promise_8_equal_bits(exactness: Exactness) -> None:
    """Alone or batched, in any chunks, cold or warm, retracted or not, with and without overlap and drafts."""
    exactness.check(RETRACTED)  # among 250 random ones, there may be none
    check_all(exactness, EXAMPLES, ["answers", "cached tokens", "retractions", "accepted_draft_tokens"])


def test_one_call_computes_all_layers(exactness: Exactness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of few tokens is one call of C++, which has the bits of the layers' own code."""
    calls, serves = [], CpuDecoderLayers.serves
    monkeypatch.setattr(CpuDecoderLayers, "serves", lambda self, x: calls.append(serves(self, x)) or calls[-1])
    exactness.check(Composition(((0, 0, None), (1, 0, None))))
    assert any(calls)
    monkeypatch.setattr(CpuDecoderLayers, "serves", lambda self, x: False)
    exactness.check(Composition(tuple((number, 0, None) for number in range(6))))


def test_promise_8_a_planted_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that chooses its order of sums by the number of rows, as the fastest one does, breaks the promise."""
    monkeypatch.setattr(exact, "PACKED_BYTES", 0)
    monkeypatch.setattr(CpuDecoderLayers, "serves", lambda self, x: False)  # the layers' own code, with the product
    own = engine("model=tutor", *POOLS["pages of 16"])
    try:
        check_all(own, 5, ["answers"])
        monkeypatch.setattr(exact.cpp, "ordered_linear", exact.cpp.linear)
        with pytest.raises(AssertionError, match="promise 8 is broken"):
            check_all(own, 40, [])
    finally:
        own.close()


@pytest.mark.parametrize("model", ["tutor", "tutor-moe"])
def test_promise_8_equal_bits_on_two_ranks(model: str) -> None:
    """Two ranks add up the same two halves as one rank."""
    answers = []
    for tp in (1, 2):
        own = engine(f"model={model}", *POOLS["pages of 16"], f"tp={tp}")
        try:
            check_all(own, EXAMPLES // (20 if tp == 2 else 50), ["answers"])
            answers.append(own.alone)
        finally:
            own.close()
    assert answers[0] == answers[1]


def test_bfloat16(tmp_path: Path) -> None:
    own = engine(f"model={tiny_checkpoint('qwen3', tmp_path)}", "dtype=bfloat16", *POOLS["pages of 16"])
    try:
        check_all(own, EXAMPLES // 5, ["answers"])
    finally:
        own.close()


def test_noise_of_long_rows() -> None:
    """The tokens are those of the plain sampler, for each row alone and beside others."""
    torch.manual_seed(0)
    logits, hashes = torch.randn(4, 40_000), token_hashes(40_000, torch.device("cpu"))
    table = torch.zeros(4, len(Param), dtype=torch.int32)
    table[:, Param.SEED_LOW] = torch.arange(4, dtype=torch.int32)
    table[:, Param.TEMPERATURE] = torch.tensor([0.7, 1.0, 1.3, 2.0]).view(torch.int32)
    rows, positions = torch.arange(4, dtype=torch.int32), torch.tensor([5, 5, 9, 700], dtype=torch.int32)
    draw_rows = partial(draw, noise=exact.noise_of_rows)
    tokens = draw_rows(logits, table, rows, positions, hashes)
    assert torch.equal(tokens, draw(logits, table, rows, positions, hashes))
    for i in range(4):
        assert draw_rows(logits[i : i + 1], table, rows[i : i + 1], positions[i : i + 1], hashes) == tokens[i]


def test_long_rows_of_logits() -> None:
    """The logarithm of a sum of exponentials is that of torch, and does not depend on the other rows."""
    torch.manual_seed(0)
    logits = torch.randn(5, 151_936)
    sums = exact.log_sum_exp(logits)
    torch.testing.assert_close(sums, logits.logsumexp(1, keepdim=True))
    for i in range(5):
        assert torch.equal(exact.log_sum_exp(logits[i : i + 1]), sums[i : i + 1])


def test_false_is_the_default() -> None:
    manager = PluginManager.load()
    assert compose(manager, ["model=tutor", "exact=false"]) == compose(manager, ["model=tutor"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tp=4"], "tp=1 or tp=2"),
        (["quantize=int8"], "does not know the order of sums"),
        (["quantize=fp8", "fp8_gemm=torch"], "exact=true does not serve weights in FP8"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tutor", overrides=["exact=true", *words]).close()
