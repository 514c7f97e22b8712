"""The gated delta rule of the training equals its definition, token after token, and so do its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.chapters.tutor import delta


def by_token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, documents: Tensor) -> Tensor:
    """Return what `delta.gated_delta` returns, by its definition."""
    ratio, rows = v.shape[2] // k.shape[2], []
    q, k = q.repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2)
    for row in range(len(v)):
        state, read = v.new_zeros(v.shape[2], k.shape[-1], v.shape[-1]), []
        for i in range(v.shape[1]):
            if i and documents[row, i] != documents[row, i - 1]:
                state = torch.zeros_like(state)
            state = state * log_decay[row, i].exp()[:, None, None]
            known = (k[row, i, :, :, None] * state).sum(1)
            u = beta[row, i][:, None] * (v[row, i] - known)
            state = state + k[row, i, :, :, None] * u[:, None]
            read.append((q[row, i, :, :, None] * state).sum(1))
        rows.append(torch.stack(read))
    return torch.stack(rows)


@pytest.mark.parametrize("length", [1, 150])
def test_gated_delta(length: int) -> None:
    """Results and gradients are those of the definition, with documents that begin anywhere and keys that are alike."""
    torch.manual_seed(length)
    shape = (2, length)
    q, k = (torch.nn.functional.normalize(torch.randn(*shape, 2, 8) + add, dim=-1) for add in (0, 1))
    inputs = [q, k, torch.randn(*shape, 4, 6), torch.rand(*shape, 4), -torch.rand(*shape, 4)]
    documents = (torch.rand(shape) < 0.05).cumsum(1).to(torch.int16)
    weights, found = torch.randn(*shape, 4, 6), []
    for rule in (delta.gated_delta, by_token):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = rule(*leaves, documents)
        found.append((out, *torch.autograd.grad((out * weights).sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_repeated_keys() -> None:
    """Equal keys in a whole chunk, where the powers of the triangular matrix are huge, do not harm the precision."""
    x = torch.ones(1, delta.CHUNK, delta.CHUNK).tril(-1)
    inverse = delta.UnitInverse.apply(x)
    torch.testing.assert_close(inverse @ (torch.eye(delta.CHUNK) + x), torch.eye(delta.CHUNK)[None])
