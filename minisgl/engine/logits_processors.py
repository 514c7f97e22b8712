"""Logits processors, applied before a token is chosen: token masks, logit bias, penalties, top-k, top-p, min-p.

Each function takes float32 logits [rows, vocab] and, as tensors, one parameter for each row. All data stays on the
device, and no function keeps state. Order and meaning are those of vLLM and transformers: masks, bias, penalties,
temperature, top-k, top-p, min-p, where each processor works on the result of the processor before it. A logit that is
-inf stays -inf, so no later processor allows a token that a mask forbids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PARTIAL_SORT_WIDTH = 256
"""For a row with top_k from 1 to this number, only this number of the row's largest logits is sorted. The width is a
constant, so the floating-point sums of a row do not depend on the parameters of other rows."""

MASK_BYTES = 32 << 20
"""Largest size in bytes of the masks that `mask_tokens` unpacks at a time."""


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place. The logits may have any float dtype.

    ``rows`` int32 [masks] lists the rows of logits that have a mask. Bit t % 32 of ``bits[i, t // 32]`` is 1 if row
    ``rows[i]`` may have token t: ``bits`` is int32 [masks, ceil(vocab / 32)] (xgrammar's format).
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    block = max(1, MASK_BYTES // (bits.shape[1] * 32 * 4))
    for some, words in zip(rows.split(block), bits.split(block), strict=True):
        octets = words.view(torch.uint8)  # token t is bit t % 8 of octet t // 8, on a little-endian machine
        forbidden = (octets[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]] == 0
        logits.index_copy_(0, some.long(), logits.index_select(0, some).masked_fill_(forbidden, -torch.inf))


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` [rows, k] to the logits of the token ids ``ids`` [rows, k] int64, in place.

    Rows with fewer than k biased tokens are padded with value 0.
    """
    return logits.scatter_add_(1, ids, values)


def apply_penalties(logits: Tensor, history: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Lower the logits of tokens that occurred before. Penalties below 1 (repetition) or 0 (the others) raise them.

    ``history`` int32 [rows, vocab] is twice the number of occurrences in the output, plus 1 if the token occurs in the
    prompt. The repetition penalty (Keskar et al., "CTRL", 2019) applies to tokens of prompt and output. The presence
    and frequency penalties apply to tokens of the output only, as OpenAI defines them.
    """
    scale = torch.where(history > 0, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    counts = history >> 1
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def top_k_p_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, width: int, sums: Any = torch) -> Tensor:
    """Return the smallest logit [rows, 1] that top-k followed by top-p keeps. Equal logits are kept too.

    ``top_k`` is int32 (0: off), ``top_p`` is in (0, 1] (Holtzman et al., "The curious case of neural text
    degeneration", 2019). Only the ``width`` largest logits of a row are sorted: ``width`` must be the vocabulary
    size, or at least every row's top_k with no top_k off. ``sums`` has torch's functions ``softmax`` and ``cumsum``.
    """
    if width < logits.shape[1]:
        values = logits.topk(width, dim=1).values
    else:
        values = logits.sort(dim=1, descending=True).values
    limit = torch.where(top_k > 0, top_k.clamp(max=width), width)
    beyond = torch.arange(width, device=logits.device) >= limit[:, None]
    probs = sums.softmax(values.masked_fill(beyond, -torch.inf), dim=1)
    before = sums.cumsum(probs, dim=1) - probs  # total probability of the more likely tokens
    kept = ((before < top_p[:, None]) | (top_p[:, None] >= 1.0)) & ~beyond
    kept[:, 0] = True
    return values.gather(1, kept.sum(dim=1, keepdim=True) - 1)


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """Return the logit [rows, 1] of a token that is ``min_p`` times as likely as the most likely token.

    For ``min_p`` 0 the threshold is -inf. Source: Nguyen et al., "Turning up the heat: min-p sampling", 2024.
    """
    return logits.amax(dim=1, keepdim=True) + min_p.log()[:, None]


def mask_below(logits: Tensor, threshold: Tensor) -> Tensor:
    """Set logits below ``threshold`` [rows, 1] to -inf, in place."""
    return logits.masked_fill_(logits < threshold, -torch.inf)
