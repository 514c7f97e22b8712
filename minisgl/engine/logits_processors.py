"""What is applied to logits before a token is chosen: token masks, top-k, top-p, and the processors of plugins.

Each function takes logits [rows, vocab] and, as tensors, one parameter for each row. All data stays on the device, and
no function keeps state. A logit that is -inf stays -inf, so nothing that is applied later allows a token that a mask
forbids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minisgl.core import Admission
from minisgl.engine.inputs import Accepted, SamplingInputs

PARTIAL_SORT_WIDTH = 256
"""For a row with top_k from 1 to this number, only this number of the row's largest logits is sorted. The width is a
constant, so the floating-point sums of a row do not depend on the parameters of other rows."""

MASK_BYTES = 32 << 20
"""Largest size in bytes of the masks that `mask_tokens` unpacks at a time."""


class LogitsProcessor:
    """Changes the logits of the requests that ask for it, such as a penalty or a logit bias: `plugins/sampling`.

    The result for a row must not depend on other rows. What the processor keeps of a request is in tensors with a row
    for each request-pool row. They change only in `admit` and `commit`, which are called in the order of the steps.
    """

    parameters: tuple[str, ...] = ()
    """Fields of `SamplingParams`. A request uses the processor if one of them does not have its default value."""
    flag = 0  # set by `Sampler.add`: the rows of a `SamplePlan` that use the processor are its ``rows[flag]``
    after_top_p = False
    """Whether it is applied after temperature, top-k and top-p, and only to rows that are not greedy; or before."""

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Note newly admitted requests that use the processor. It replaces what their request-pool rows had before."""

    def apply(self, logits: Tensor, inputs: SamplingInputs, rows: Tensor | None) -> Tensor:
        """Return the changed ``logits``, float32 [rows, vocab], which may be overwritten.

        ``rows`` int32 [rows] says which of the step's sampled positions, as ``inputs`` has them, these are. None: all.
        """
        raise NotImplementedError

    def commit(
        self, tokens: Tensor, inputs: SamplingInputs, accepted: Accepted | None, rows: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        """Note the ``tokens`` int64 [all sampled positions] of a step.

        ``accepted`` is the result of ``inputs.verification``; None: every token counts. ``rows`` is as in `apply`.
        Returns tensors of which one of `ModelRunner.readers` adds something to the step's result, by name, or None.
        """
        return None


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


def mask_below(logits: Tensor, threshold: Tensor) -> Tensor:
    """Set logits below ``threshold`` [rows, 1] to -inf, in place."""
    return logits.masked_fill_(logits < threshold, -torch.inf)
