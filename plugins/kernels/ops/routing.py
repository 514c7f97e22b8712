"""Routing of tokens to experts: softmax over the router's logits, then the k largest probabilities.

SGLang and vLLM call it `fused_topk`; ``renormalize`` is the checkpoint's ``norm_topk_prob``. Source: Shazeer et al.,
Outrageously Large Neural Networks, 2017. This module has the torch reference; on a GPU routing is one Triton launch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_topk(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose k experts for each token of logits [tokens, experts].

    Returns expert numbers [tokens, k] int32, the most probable first, and their weights [tokens, k] float32. The
    softmax is over all experts, in float32; ``renormalize`` scales the k weights to sum to 1.
    """
    if logits.is_cuda:
        from minisgl.plugins.kernels.ops.triton import routing as triton

        return triton.softmax_topk(logits, k, renormalize)
    return softmax_topk_torch(logits, k, renormalize)


def softmax_topk_torch(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Compute `softmax_topk` in plain torch: the torch reference."""
    weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.int(), weights
