"""The one-launch all-reduce against its twin: one rank runs, and the test plays the others."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from torch import Tensor

from minisgl.kernel.reduce import EMPTY, TURNS, Mailboxes, make_mailboxes, sum_add_norm
from minisgl.kernel.triton import reduce as triton_reduce

ROWS = 4


def mailboxes(rank: int, size: int, like: Tensor) -> Mailboxes:
    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [torch.full(shape, EMPTY[dtype], dtype=dtype, device=like.device) for _ in range(size)]

    return make_mailboxes(allocate, lambda: None, rank, size, ROWS, like)


def push(boxes: Mailboxes, sender: int, x: Tensor, turns: list[int]) -> None:
    """What rank ``sender`` does for the rank that runs: ``turns[i]`` messages went through row i before."""
    for row, turn in zip(range(len(x)), turns, strict=False):
        place = boxes.boxes[boxes.rank][row, turn % TURNS, sender]
        assert is_empty(place), f"row {row}, message {turn}: pushed where something still stands"
        place.copy_(torch.where(x[row] == 0, 0.0, x[row]).view(place.dtype))


def is_empty(place: Tensor) -> bool:
    return bool((place == EMPTY[place.dtype]).all())


@pytest.mark.parametrize(("size", "dim"), [(2, 64), (4, 96)])
def test_rows_are_summed_in_rank_order_added_and_normalised(
    size: int, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Messages of different lengths one after another, so that rows come to count differently; and half of the peers
    are fast: their next message stands in the box before this one is summed."""
    rank = size - 2
    others = [r for r in range(size) if r != rank]
    weight = torch.rand(dim, generator=generator, device=device).to(dtype)
    boxes = mailboxes(rank, size, weight.view(1, dim))
    lengths = (3, 1, 4, 2, 3, 4)
    messages = [torch.randn(size, rows, dim, generator=generator, device=device).to(dtype) for rows in lengths]
    turns = [[sum(n > row for n in lengths[:i]) for row in range(ROWS)] for i in range(len(lengths) + 1)]
    for parts in messages:
        parts[:, :, 3] = -0.0
    for other in others[::2]:
        push(boxes, other, messages[0][other], turns[0])
    for i, parts in enumerate(messages):
        for other in others[1::2]:
            push(boxes, other, parts[other], turns[i])
        if i + 1 < len(messages):
            for other in others[::2]:
                push(boxes, other, messages[i + 1][other], turns[i + 1])
        residual = torch.randn(lengths[i], dim, generator=generator, device=device).to(dtype)
        want = sum_add_norm(parts.cpu().unbind(), residual.cpu().clone(), weight.cpu(), 1e-6)
        out, total = triton_reduce.all_reduce_norm(parts[rank].clone(), residual, weight, 1e-6, boxes)
        assert torch.equal(total.cpu(), want[1])
        torch.testing.assert_close(out.cpu(), want[0], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
        for other in others:  # what the others got
            for row in range(lengths[i]):
                got = boxes.boxes[other][row, turns[i][row] % TURNS, rank]
                assert torch.equal(got.view(dtype), parts[rank, row])
                assert not (got == EMPTY[got.dtype]).any()
                got.fill_(EMPTY[got.dtype])
        assert boxes.turns.tolist() == [turn % TURNS for turn in turns[i + 1]]


def test_the_sum_alone(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    parts = torch.randn(2, 2, 80, generator=generator, device=device).to(dtype)
    boxes = mailboxes(0, 2, parts[0])
    push(boxes, 1, parts[1], [0, 0])
    x = parts[0].clone()
    assert triton_reduce.all_reduce(x, boxes) is x
    assert torch.equal(x, parts[0] + parts[1])


def test_what_does_not_fit_is_told(device: torch.device) -> None:
    boxes = mailboxes(0, 2, torch.empty(1, 64, device=device))
    fits = torch.empty(ROWS, 64, device=device)
    assert boxes.fits(fits) and boxes.fits(fits[:1])
    for x in (fits.half(), fits[:0], fits[:, :32], fits.view(-1), fits.T, torch.empty(ROWS + 1, 64, device=device)):
        assert not boxes.fits(x)
