"""The one-launch all-reduce compared with its torch reference: one rank runs, the test simulates the other ranks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from torch import Tensor

from minisgl.plugins.kernels.ops.reduce import (
    EMPTY,
    TURNS,
    Mailboxes,
    bits_of,
    cut_mailboxes,
    empty,
    mailbox_bytes,
    sum_add_norm,
)
from minisgl.plugins.kernels.ops.triton import reduce as triton_reduce

ROWS = 4


def mailboxes(rank: int, size: int, like: Tensor) -> Mailboxes:
    """Return empty mailboxes of all ranks on one device, as rank ``rank`` sees them."""
    parts = [torch.zeros(mailbox_bytes(ROWS * like[:1].nbytes, size), dtype=torch.uint8, device=like.device)] * size
    parts = [part.clone() for part in parts]
    for part in parts:
        empty(part)
    boxes = cut_mailboxes(parts, rank, like)
    assert boxes is not None
    assert boxes.rows == ROWS
    assert is_empty(boxes.boxes[rank])
    return boxes


def push(boxes: Mailboxes, sender: int, x: Tensor, turns: list[int]) -> None:
    """Write rank ``sender``'s rows into the running rank's mailbox; row i has had ``turns[i]`` messages before."""
    for row, turn in zip(range(len(x)), turns, strict=False):
        buffer = boxes.boxes[boxes.rank][row, turn % TURNS, sender]
        assert is_empty(buffer), f"row {row}, message {turn}: the buffer was not emptied before this write"
        bits = x[row].view(buffer.dtype)
        buffer.copy_(torch.where(bits == EMPTY[buffer.element_size()], 0, bits))


def is_empty(buffer: Tensor) -> bool:
    """Return whether all elements have the bit pattern `EMPTY`."""
    return bool((buffer == EMPTY[buffer.element_size()]).all())


@pytest.mark.parametrize(("size", "dim"), [(2, 64), (4, 96)])
def test_all_reduce_norm(
    size: int, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Sum messages of different lengths one after another, with fast and slow peers.

    Different lengths make the rows' message counts differ. Half of the peers are fast: their next message is in the
    mailbox before the current one is summed.
    """
    rank = size - 2
    others = [r for r in range(size) if r != rank]
    weight = torch.rand(dim, generator=generator, device=device).to(dtype)
    boxes = mailboxes(rank, size, weight.view(1, dim))
    lengths = (3, 1, 4, 2, 3, 4)
    messages = [torch.randn(size, rows, dim, generator=generator, device=device).to(dtype) for rows in lengths]
    turns = [[sum(n > row for n in lengths[:i]) for row in range(ROWS)] for i in range(len(lengths) + 1)]
    for parts in messages:
        parts[:, :, 3] = -0.0
        bits = parts.view(bits_of(dtype))
        bits[:, :, 5] = EMPTY[bits.element_size()]
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
        for other in others:  # the rows that the running rank sent
            for row in range(lengths[i]):
                got = boxes.boxes[other][row, turns[i][row] % TURNS, rank]
                torch.testing.assert_close(got.view(dtype), parts[rank, row], rtol=0, atol=1e-38)
                assert not (got == EMPTY[got.element_size()]).any()
                got.fill_(EMPTY[got.element_size()])
        assert boxes.turns.tolist() == [turn % TURNS for turn in turns[i + 1]]


def test_all_reduce(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    parts = torch.randn(2, 2, 80, generator=generator, device=device).to(dtype)
    boxes = mailboxes(0, 2, parts[0])
    push(boxes, 1, parts[1], [0, 0])
    x = parts[0].clone()
    assert triton_reduce.all_reduce(x, boxes) is x
    assert torch.equal(x, parts[0] + parts[1])


def test_fits(device: torch.device) -> None:
    """Tensors of another dtype, width, length or layout do not fit."""
    boxes = mailboxes(0, 2, torch.empty(1, 64, device=device))
    fits = torch.empty(ROWS, 64, device=device)
    assert boxes.fits(fits) and boxes.fits(fits[:1])
    for x in (fits.half(), fits[:0], fits[:, :32], fits.view(-1), fits.T, torch.empty(ROWS + 1, 64, device=device)):
        assert not boxes.fits(x)


def test_cut_mailboxes(device: torch.device) -> None:
    """No mailboxes for rows that are too long, of an unsupported dtype or not two-dimensional."""
    part = torch.zeros(mailbox_bytes(64, 2), dtype=torch.uint8, device=device)
    for x in (torch.empty(1, 33), torch.empty(1, 16).double(), torch.empty(16), torch.empty(1, 16).long()):
        assert cut_mailboxes([part, part], 0, x.to(device)) is None
    assert cut_mailboxes([part, part], 0, torch.empty(1, 16, device=device)) is not None
