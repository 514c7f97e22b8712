"""``exact=true`` in Triton: each kernel gives a row the same bits in any batch, and so does the engine (promise 8).

MINISGL_EXACT_SHAPE=0.6b computes the compositions with random weights in the shape of Qwen3-0.6B, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from minisgl.core import SamplingParams
from minisgl.plugins.sampling.top_k_p import top_k_p_threshold
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.exact import Answer, Composition, Exactness, compositions, example_requests

pytest.importorskip("transformers", reason="transformers writes the checkpoints")

COMPOSITIONS = int(os.environ.get("MINISGL_COMPOSITIONS", "200"))
SHAPE = os.environ.get("MINISGL_EXACT_SHAPE", "")


# ---- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "inputs", "halves"), [(80, 1040, 2), (192, 1024, 2), (64, 1536, 1), (40, 48, 1)])
def test_products(
    out: int, inputs: int, halves: int, dtype: torch.dtype, device: torch.device, compiled: bool,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Alone, in batches, in tall tiles, in one program or split: one result, also as the sum of two ranks."""
    from minisgl.plugins.kernels.ops.triton.exact_linear import linear

    rows = 1100 if compiled else 67
    x = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
    weight = torch.randn(out, inputs, generator=generator, device=device).to(dtype)
    bias = torch.randn(out, generator=generator, device=device).to(dtype)
    y = linear(x, weight, bias, halves)
    scale = inputs**0.5
    expected = (x.double() @ weight.double().T + bias.double()) / scale
    torch.testing.assert_close(y.double() / scale, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
    for batch in (1, 2, 5, 16, 17, 63, 64, 65, 128, 300, 511, 513, 1000) if compiled else (1, 3, 65):
        for split in (False, True):
            some = slice(rows - batch, rows)
            assert torch.equal(linear(x[some], weight, bias, halves, split=split), y[some]), (batch, split)
    if halves == 2:
        middle = inputs // 2
        ranks = [linear(x[:, :middle], weight[:, :middle], bias), linear(x[:, middle:], weight[:, middle:])]
        assert torch.equal(ranks[0] + ranks[1], y)
        columns = out // 2  # a column-parallel product of two ranks has half of the outputs
        assert torch.equal(linear(x, weight[:columns], bias[:columns], halves), y[:, :columns])


def test_products_of_published_shapes(device: torch.device, compiled: bool, generator: torch.Generator) -> None:
    """The shapes of Qwen3-0.6B and of 14B, in batches of 1 to 300 rows."""
    if not compiled:
        pytest.skip("too slow for the interpreter")
    from minisgl.plugins.kernels.ops.triton.exact_linear import linear

    shapes = [(4096, 1024, 1), (1024, 2048, 2), (6144, 1024, 1), (1024, 3072, 2), (151936, 1024, 1), (5120, 17408, 2)]
    for out, inputs, halves in shapes:
        x = torch.randn(2048, inputs, generator=generator, device=device).bfloat16()
        weight = torch.randn(out, inputs, generator=generator, device=device).bfloat16()
        tall, y = linear(x[:600], weight, None, halves), linear(x[:300], weight, None, halves)
        assert torch.equal(tall[:300], y), (out, inputs, "tall tiles")
        for batch in (1, 2, 3, 8, 31, 64, 65, 129, 256, 299):
            assert torch.equal(linear(x[300 - batch : 300], weight, None, halves), y[300 - batch :]), (out, batch)


def attend(
    rows: list[tuple[int, int]], window: int, soft_cap: float, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return the results of the last queries of rows of (queries, positions), whose contents depend on the row only."""
    from minisgl.plugins.kernels.ops.triton import exact_attention
    from minisgl.plugins.kernels.ops.triton.attention import Heads, Pages

    page, dim, longest = 16, 32, 640
    heads = Heads(4, 2, dim, dim**-0.5, window, soft_cap)
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(2, longest, 2, dim, generator=generator).to(dtype)
    queries = torch.randn(longest, 4, dim, generator=generator).to(dtype)
    columns = longest // page
    table = torch.randperm(columns * len(rows), generator=generator).view(len(rows), columns).int()
    pool = torch.full((2, columns * len(rows), page, 2, dim), float("nan"), dtype=dtype)
    for row, (_, length) in enumerate(rows):
        for place in range(length):
            pool[:, table[row, place // page], place % page] = kv[:, place]
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32, device=device)
    q = torch.cat([queries[length - count : length] for count, length in rows]).to(device)
    pages = Pages(*pool.to(device), table.to(device), torch.arange(len(rows), dtype=torch.int32).to(device), lengths)
    out = torch.empty_like(q)
    ends = np.cumsum([0, *(count for count, _ in rows)])
    if all(count == 1 for count, _ in rows):
        order = torch.arange(len(rows), dtype=torch.int32, device=device)
        for programs in (1, 10_000):  # whole rows, and splits in programs of their own
            again = torch.empty_like(q)
            exact_attention.attention(q, again, pages, heads, order, None, programs)
            assert programs == 1 or torch.equal(out, again)
            out = again
    else:
        m = exact_attention.tile_of(heads, dtype).m
        tiles = [(row, tile) for row, (count, _) in enumerate(rows) for tile in range(-(-count * 2 // m))]
        cu_seqlens_q = torch.tensor(ends, dtype=torch.int32, device=device)
        made = torch.tensor(tiles, dtype=torch.int32, device=device)
        exact_attention.attention(q, out, pages, heads, made, cu_seqlens_q, 1)
    return [out[end - 1] for end in ends[1:]]


@pytest.mark.parametrize(("window", "soft_cap"), [(-1, 0.0), (100, 0.0), (-1, 3.0)])
def test_attention(window: int, soft_cap: float, dtype: torch.dtype, device: torch.device, compiled: bool) -> None:
    """The last query of a row has the same bits alone, in a batch, and in a chunk of any length."""
    lengths = (1, 16, 100, 256, 257, 600) if compiled else (16, 257, 300)
    alone = {length: attend([(1, length)], window, soft_cap, dtype, device)[0] for length in lengths}
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 640, 2, 32, generator=generator).to(dtype).double()
    q = torch.randn(640, 4, 32, generator=generator).to(dtype).double()
    for length, result in alone.items():
        first = max(0, length - window) if window >= 0 else 0
        scores = torch.einsum("khd,lkd->khl", q[length - 1].view(2, 2, 32), k[first:length]) * 32**-0.5
        weights = (soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores).softmax(-1)
        expected = torch.einsum("khl,lkd->khd", weights, v[first:length]).reshape(4, 32)
        torch.testing.assert_close(
            result.double().cpu(), expected, rtol=0, atol=2e-5 if dtype == torch.float32 else 0.02
        )
    for count in (1, 2, 3, 40, 300) if compiled else (1, 40):
        rows = [(min(count, length), length) for length in lengths]
        for length, result in zip(lengths, attend(rows, window, soft_cap, dtype, device), strict=True):
            assert torch.equal(result, alone[length]), (count, length)


@pytest.mark.parametrize("columns", [320, 151_936])
def test_sums_of_logits(columns: int, device: torch.device, compiled: bool, generator: torch.Generator) -> None:
    """Log-probabilities and top-p thresholds are those of torch, and do not depend on the other rows."""
    if not compiled and columns > 1000:
        columns = 5000
    from minisgl.plugins.kernels.ops.triton import exact_sums

    logits = torch.randn(300 if compiled else 3, columns, generator=generator, device=device) * 3
    sums, added = exact_sums.log_sum_exp(logits), exact_sums.cumsum(logits.abs())
    torch.testing.assert_close(sums, logits.logsumexp(1, keepdim=True))
    torch.testing.assert_close(added, logits.abs().cumsum(1), rtol=1e-4, atol=1e-4)
    top_k = torch.full((len(logits),), 20, dtype=torch.int32, device=device)
    top_p = torch.full((len(logits),), 0.9, device=device)
    exact_threshold = partial(top_k_p_threshold, sums=exact_sums)
    thresholds = exact_threshold(logits, top_k, top_p, 256)
    expected = top_k_p_threshold(logits, top_k, top_p, 256)
    assert (thresholds != expected).sum() <= len(logits) // 100  # a sum may lie on the border
    for batch in (1, 2, 7, 64, 299) if compiled else (1, 2):
        some = slice(1, 1 + batch)
        assert torch.equal(exact_sums.log_sum_exp(logits[some]), sums[some])
        assert torch.equal(exact_sums.cumsum(logits[some].abs()), added[some])
        assert torch.equal(exact_threshold(logits[some], top_k[some], top_p[some], 256), thresholds[some])


# ---- the engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options of a random checkpoint in the shape of a small Qwen3."""
    if device.type == "cpu":
        path = tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
        return [f"model={path}", "dtype=float32"]
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "max_position_embeddings": 2048}
    path = tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), **sizes)
    return [f"model={path}", "dtype=bfloat16"]


def requests(device: torch.device) -> list[tuple[list[int], SamplingParams]]:
    """Return the requests of compositions: long ones on a GPU, and few short ones under the interpreter."""
    if device.type == "cuda":
        return example_requests(scale=4)
    few = {"max_tokens": 2, "ignore_eos": True, "logprobs": 1}
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "top_k": 20, "top_p": 0.9}]
    common = list(range(3, 21))
    return [(common + [30] * number, SamplingParams(**few, **kinds[number % 2])) for number in range(1, 4)]


def engine(device: torch.device, *words: str) -> Exactness:
    pool = ("page_size=16", "num_pages=9", "max_seq_len=96")
    if device.type == "cuda":
        pool = ("page_size=16", "num_pages=25", "max_seq_len=384")
    fixed = ("exact=true", "max_running_requests=5", "max_draft_tokens=3")
    return Exactness([f"device={device.type}", *fixed, *pool, *words], requests(device))


def check_all(exactness: Exactness, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(compositions(len(exactness.requests)))
    def check(composition: Composition) -> None:
        exactness.check(composition)

    check()


def answers_of(
    device: torch.device, examples: int, *words: str, needed: Sequence[str] = ("answers", "cached tokens")
) -> list[Answer | None]:
    """Check random compositions with the options, and one in which long requests are retracted on a GPU.

    ``needed`` are names in `Exactness.seen`. Returns the answers of the requests alone.
    """
    own = engine(device, *words)
    try:
        if device.type == "cuda":
            longest = sorted(range(len(own.requests)), key=lambda number: -own.requests[number][1].max_tokens)
            for choice in (0, 2):
                own.check(Composition(tuple((number, 0, None) for number in longest[:6]), choice))
            assert own.seen["retractions"], own.seen
        check_all(own, examples)
        if device.type == "cuda":
            assert all(own.seen[name] for name in needed), own.seen
        return list(own.alone)
    finally:
        own.close()


def test_promise_8_equal_bits(model: list[str], device: torch.device, compiled: bool) -> None:
    """In random compositions, and with graphs the bits are those without."""
    if not compiled:
        answers_of(device, 2, *model)
        return
    needed = ("answers", "cached tokens", "accepted_draft_tokens")
    plain = answers_of(device, COMPOSITIONS // 2, *model, "graph=none", needed=needed)
    assert answers_of(device, COMPOSITIONS // 2, *model, "graph=cuda", needed=needed) == plain


def test_promise_8_equal_bits_in_a_published_shape(device: torch.device, compiled: bool) -> None:
    if not compiled or SHAPE != "0.6b":
        pytest.skip("needs a CUDA device and MINISGL_EXACT_SHAPE=0.6b")
    words = ["model=qwen3-0.6b", "load_format=dummy", "dtype=bfloat16"]
    answers_of(device, COMPOSITIONS, *words, "graph=cuda")


def test_promise_8_equal_bits_on_two_ranks(model: list[str], device: torch.device, compiled: bool) -> None:
    if not compiled or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    one = answers_of(device, COMPOSITIONS // 10, *model, "graph=cuda")
    assert answers_of(device, COMPOSITIONS // 10, *model, "graph=cuda", "tp=2") == one


def test_promise_8_a_planted_kernel_is_found(
    model: list[str], device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that cuts its inputs by the number of rows, to keep a GPU busy, breaks the promise."""
    from minisgl.plugins.kernels.ops.triton import exact_linear

    right, segments = exact_linear.linear, exact_linear.segments

    def planted(x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(exact_linear, "segments", segments if len(x) > 1 else lambda inputs, dtype: 1)
            return right(x, *args, **more)

    monkeypatch.setattr(exact_linear, "linear", planted)
    if compiled:
        own = engine(device, *model, "graph=none")
        try:
            with pytest.raises(AssertionError, match="promise 8 is broken"):
                check_all(own, 40)
        finally:
            own.close()
    x, weight = torch.randn(2, 1024, device=device), torch.randn(64, 1024, device=device)
    assert not torch.equal(planted(x, weight)[:1], planted(x[:1], weight))
