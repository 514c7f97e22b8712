"""What changes logits before a token is chosen: bias, penalties, top-k, top-p, min-p. Pure functions over rows.

Each takes float32 logits [rows, vocab] and one parameter a row, as tensors; all stays on the device. Order and
meaning are those of vLLM and transformers: bias, penalties, temperature, top-k, top-p, min-p, each on what the one
before left.
"""

from __future__ import annotations

import torch
from torch import Tensor

NARROW = 256
"""Rows whose top-k is at most this wide are sorted that far only. Fixed, so that a row's sums never depend on its
neighbours' parameters."""


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` [rows, k] to the logits of ``ids`` [rows, k] int64, in place. Pad with value 0."""
    return logits.scatter_add_(1, ids, values)


def penalise(
    logits: Tensor, prompt: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Make tokens that came before less likely (or, below 1 or 0, more).

    ``prompt`` bool [rows, vocab]: in the prompt; ``counts`` int32 [rows, vocab]: times in the output. Repetition
    (Keskar et al., "CTRL", 2019) counts both, presence and frequency the output only, as OpenAI defines them.
    """
    repeated = prompt | (counts > 0)
    scale = torch.where(repeated, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def top_k_p_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """[rows, 1]: the smallest logit that top-k and then top-p keep. Ties with it are kept too.

    ``top_k`` int32 (0: off), ``top_p`` in (0, 1] (Holtzman et al., "The curious case of neural text degeneration",
    2019). Only the ``width`` largest logits are sorted: at least top_k, or all.
    """
    if width < logits.shape[1]:
        values = logits.topk(width, dim=1).values
    else:
        values = logits.sort(dim=1, descending=True).values
    limit = torch.where(top_k > 0, top_k.clamp(max=width), width)
    beyond = torch.arange(width, device=logits.device) >= limit[:, None]
    probs = values.masked_fill(beyond, -torch.inf).softmax(dim=1)
    before = probs.cumsum(dim=1) - probs  # what the more likely ones hold together
    kept = ((before < top_p[:, None]) | (top_p[:, None] >= 1.0)) & ~beyond
    kept[:, 0] = True
    return values.gather(1, kept.sum(dim=1, keepdim=True) - 1)


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """[rows, 1]: the logit of a token ``min_p`` times as likely as the likeliest (Nguyen et al., 2024). 0: -inf."""
    return logits.amax(dim=1, keepdim=True) + min_p.log()[:, None]


def keep_from(logits: Tensor, threshold: Tensor) -> Tensor:
    """Logits below ``threshold`` [rows, 1] become -inf, in place."""
    return logits.masked_fill_(logits < threshold, -torch.inf)
