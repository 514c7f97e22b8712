"""The gated delta rule over packed rows, in a form that trains fast: products of whole chunks, and one short loop.

Yang et al., Gated Delta Networks, 2024 (arXiv:2412.06464). The layers of `tutor-hybrid` compute it in training. A state
absorbs one document: at the first token of the next one it is empty again. A served model computes the same rule in
`minisgl.plugins.models.gated_delta`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""Tokens that are absorbed together. The loop has one step for each chunk of a row."""


def gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, documents: Tensor) -> Tensor:
    """Return what each token reads of its document's state, [rows, length, heads, dv], float32.

    q and k are [rows, length, key heads, dk] of length 1, v is [rows, length, heads, dv], ``beta`` and ``log_decay``
    are [rows, length, heads], ``documents`` [rows, length]. A key head serves equally many consecutive heads. Token i
    makes of the state S first S' = exp(log_decay_i)·S, then adds k_i·u_i with u_i = beta_i·(v_i - k_i·S'), and reads
    q_i·S.
    """
    rows, length, heads, dv = v.shape
    missing = -length % CHUNK
    ids = F.pad(documents.int(), (0, missing), value=-1).view(rows, -1, CHUNK).transpose(0, 1)  # [chunks, rows, CHUNK]
    before = torch.cat((torch.full_like(ids[:1], -1), ids[:-1]))[..., -1:]  # the last document of the chunk before
    q, k, v, beta, log_decay = (_chunks(x.float(), missing, k.shape[2]) for x in (q, k, v, beta, log_decay))
    total = log_decay.cumsum(-1)  # [chunks, rows, key heads, ratio, CHUNK]

    def masked(exponent: Tensor, seen: Tensor) -> Tensor:
        """Return the decays exp(exponent), and 0 where ``seen`` is False: there the documents differ."""
        return torch.where(seen[:, :, None, None], exponent, -torch.inf).exp()

    same = (ids[..., :, None] == ids[..., None, :]).tril()
    past = masked(total[..., :, None] - total[..., None, :], same)  # from token j up to token i ≥ j
    from_state = masked(total, ids == before)[..., None]
    to_end = masked(total[..., -1:] - total, ids == ids[..., -1:])[..., None]
    whole = masked(total[..., -1:], ids[..., -1:] == before)[..., None]
    solved: Tensor = UnitInverse.apply((k @ k.mT) * past.tril(-1) * beta[..., None])  # type: ignore[no-untyped-call]
    w = solved @ (beta[..., None] * from_state * k)  # u = fresh - w @ S for the state S before the chunk
    fresh = solved @ (beta[..., None] * v)
    leaving = (k * to_end).mT
    step = whole * torch.eye(k.shape[-1], device=k.device) - leaving @ w
    flat = (step.shape[0], -1)
    states = scan(step.reshape(*flat, *step.shape[-2:]), (leaving @ fresh).reshape(*flat, *step.shape[-1:], dv))
    states = states.view(*step.shape[:-1], dv)
    read = (from_state * q) @ states + ((q @ k.mT) * past) @ (fresh - w @ states)
    out: Tensor = read.permute(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads, dv)[:, :length]
    return out


def _chunks(x: Tensor, missing: int, key_heads: int) -> Tensor:
    """Return x [rows, length, n, ...] as [chunks, rows, key heads, n / key heads, CHUNK, ...], padded with zeros."""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    x = x.view(len(x), -1, CHUNK, key_heads, x.shape[2] // key_heads, *x.shape[3:])
    return x.permute(1, 0, 3, 4, 2, *range(5, x.ndim))


def short_convolution(x: Tensor, weight: Tensor, documents: Tensor) -> Tensor:
    """Return the causal convolution of x [rows, length, features] with ``weight`` [features, 1, n].

    A token's result does not depend on other documents.
    """
    out = x * weight[:, 0, -1]
    for back in range(1, weight.shape[-1]):
        shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        same = F.pad(documents, (back, 0), value=-1)[:, : x.shape[1]] == documents
        out = out + torch.where(same[..., None], shifted, 0) * weight[:, 0, -1 - back]
    return out


class UnitInverse(torch.autograd.Function):
    """The inverse of 1 + x, for strictly lower triangular matrices x [..., CHUNK, CHUNK].

    It doubles the size of the blocks on the diagonal whose inverse is known. A power series of x needs as few products,
    but its terms are huge if keys are alike, as in a text that repeats itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.shape[-1]
        index = torch.arange(size, device=x.device)
        known = torch.eye(size, device=x.device, dtype=x.dtype).expand_as(x)
        half = 1
        while half < size:
            block, lower = index // (2 * half), index // half % 2 == 1
            corner = (block[:, None] == block) & lower[:, None] & ~lower  # the lower left quarters of the blocks
            new = torch.where(corner, x, 0)
            known = known - (new if half == 1 else known @ new @ known)
            half *= 2
        ctx.save_for_backward(known)
        return known

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        known: Tensor = ctx.saved_tensors[0]
        return -(known.mT @ grad @ known.mT).tril(-1)


@torch.library.custom_op("minisgl_tutor::scan", mutates_args=())
def scan(step: Tensor, new: Tensor) -> Tensor:
    """Return the states S_0 = 0, S_(c+1) = step_c @ S_c + new_c, before each chunk c.

    ``step`` is [chunks, n, dk, dk]; ``new`` and the result are [chunks, n, dk, dv]. torch.compile does not look into
    the loop, which has too many operations for it.
    """
    states = torch.empty_like(new, memory_format=torch.contiguous_format)
    states[0] = 0
    for c in range(len(step) - 1):
        torch.baddbmm(new[c], step[c], states[c], out=states[c + 1])
    return states


@scan.register_fake
def _(_step: Tensor, new: Tensor) -> Tensor:
    return torch.empty_like(new, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    step, states = ctx.saved_tensors
    after = scan(step.mT.flip(0).contiguous(), grad.flip(0).contiguous()).flip(0)  # the gradients of S_(c+1)
    return after @ states.mT, after


scan.register_autograd(_scan_backward, setup_context=_keep)
