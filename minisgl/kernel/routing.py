"""Which experts a token goes to: softmax over the router's logits, the largest k, their weights.

Shazeer et al., Outrageously Large Neural Networks, 2017. Here is the plain torch version; on a GPU it is one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_topk(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [tokens, experts] → experts [tokens, k] int32, likeliest first, and weights [tokens, k] float32.

    The softmax is over all experts, in float32; ``renormalise`` makes the k weights sum to 1.
    """
    if logits.is_cuda:
        from minisgl.kernel.triton import routing as triton

        return triton.softmax_topk(logits, k, renormalise)
    return softmax_topk_torch(logits, k, renormalise)


def softmax_topk_torch(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """`softmax_topk` in plain torch."""
    weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.int(), weights
