"""What is applied to logits before a token is chosen: token masks, and the processors of plugins.

All data stays on the device. A logit that is -inf stays -inf, so nothing that is applied later allows a token that a
mask forbids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minisgl.core import Admission, SamplingParams
from minisgl.engine.inputs import Accepted, SamplingInputs

MASK_BYTES = 32 << 20
"""Largest size in bytes of the masks that `mask_tokens` unpacks at a time."""


class LogitsProcessor:
    """Changes the logits of the requests that ask for it, such as a penalty or a logit bias: `plugins/sampling`.

    The result for a row must not depend on other rows. What the processor keeps of a request is in tensors with a row
    for each request-pool row. They change only in `admit` and `commit`, which are called in the order of the steps.
    """

    parameters: tuple[str, ...] = ()
    """Fields of `SamplingParams`. A request uses the processor if one of them does not have its default value, and if
    `serves` agrees."""
    flag = 0  # set by `Sampler.add`: the rows of a `SamplePlan` that use the processor are its ``rows[flag]``
    order = 50
    """Processors are applied in this order, the lowest number first. The shipped ones have 0 to 20 and 60 to 80."""
    after_temperature = False
    """Whether it is applied after the temperature, and only to rows that are not greedy; or before."""

    def serves(self, params: SamplingParams) -> bool:
        """Return whether a request uses the processor that has other than default values of its ``parameters``."""
        return True

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
        Returns tensors by name, for the function in `ModelRunner.readers` that adds to the step's result; or None.
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
