"""Softmax and top-k of the router in one Triton launch: k times the maximum of the experts not yet chosen.

`minisgl.plugins.kernels.ops.routing` has the torch reference and describes arguments and results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous


@triton.jit
def softmax_topk_kernel(
    logits, ids, weights, tokens, stride_logits,
    EXPERTS: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Choose K experts for BLOCK_T tokens and write their numbers and weights. One program: BLOCK_T tokens."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    real = (token[:, None] < tokens) & (expert[None, :] < EXPERTS)
    if EARLY:
        start_next()
        wait_for_previous()
    at = logits + token.to(tl.int64)[:, None] * stride_logits + expert[None, :]
    left = tl.load(at, mask=real, other=float("-inf")).to(tl.float32)
    left = tl.where(token[:, None] < tokens, left, 0.0)
    top = tl.max(left, 1)
    total = tl.sum(tl.exp(left - top[:, None]), 1)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for i in tl.static_range(K):
        best, which = tl.max(left, 1, return_indices=True)  # among equal logits the smallest expert number
        chosen = tl.where(choice[None, :] == i, which[:, None], chosen)
        weight = tl.where(choice[None, :] == i, tl.exp(best - top)[:, None], weight)
        left = tl.where(expert[None, :] == which[:, None], float("-inf"), left)
    if RENORMALIZE:
        total = tl.sum(weight, 1)
    weight = weight / total[:, None]
    out = token[:, None] * K + choice[None, :]
    real = (token[:, None] < tokens) & (choice[None, :] < K)
    tl.store(ids + out, chosen, mask=real)
    tl.store(weights + out, weight, mask=real)


def softmax_topk(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.plugins.kernels.ops.routing.softmax_topk` on a GPU."""
    tokens, experts = logits.shape
    ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    block_t = 1 if tokens < 1024 else 4
    softmax_topk_kernel[(triton.cdiv(tokens, block_t),)](
        logits, ids, weights, tokens, logits.stride(0), EXPERTS=experts, K=k, RENORMALIZE=renormalize,
        BLOCK_T=block_t, BLOCK_E=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(k),
        num_warps=1 if block_t == 1 else 4, **starts_early(logits),
    )  # fmt: skip
    return ids, weights
