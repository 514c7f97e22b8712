"""Sampler: chooses a token for each row of logits, on the device, for all rows of a step at once.

A row of logits belongs to one sampled position. Most requests have one in a step; a request whose drafts are verified
has several. The host does not wait for the device. The sampler keeps the sampling state of each request-pool row. This
state changes only when a step admits a request or commits sampled tokens, in the order of the steps. The token of a
row depends on its own logits, parameters, seed, position, mask and (with penalties) earlier tokens, never on other rows
of the batch. Top-k, top-p, penalties and others are processors of `plugins/sampling`. SGLang builds a
`SamplingBatchInfo` and vLLM a `SamplingMetadata` for each batch instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.core import I32, Admission, SamplingParams, TokenMasks
from minisgl.engine import logits_processors
from minisgl.engine.gumbel import Param, draw, seed_key, token_hashes
from minisgl.engine.inputs import Accepted, SamplePlan, SamplingInputs, Uploader
from minisgl.engine.logits_processors import LogitsProcessor

RANDOM = 1  # the flag of a request that is not greedy; the processors that it uses have the flags above this one
PROCESSORS = -1 << 1  # the flags of all processors
_DEFAULT = SamplingParams()

MIN_TEMPERATURE = 1e-5  # lower ones (of rows that are not greedy) are raised to it, or float32 could overflow


def state_bytes(max_running_requests: int, vocab_size: int) -> int:
    """Return the bytes of device memory that a `Sampler` allocates for its state at most.

    The memory of one step, such as its logits in float32, is not part of it, nor is that of the processors.
    """
    return (max_running_requests + 1) * 4 * len(Param) + 4 * vocab_size


class Sampler:
    """Sampling state of ``max_running_requests`` request-pool rows plus the scratch row, and the choice of tokens."""

    def __init__(self, max_running_requests: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        # Faster functions may replace these: see `minisgl.models.converter.Kernels.convert_sampler`.
        self.draw: Callable[..., Tensor] = draw
        self.argmax: Callable[[Tensor], Tensor] = partial(torch.argmax, dim=1)
        self.mask_tokens: Callable[[Tensor, Tensor, Tensor], None] = logits_processors.mask_tokens
        self.log_sum_exp: Callable[[Tensor], Tensor] = partial(torch.logsumexp, dim=1, keepdim=True)
        self.sums: Any = torch  # its functions ``softmax`` and ``cumsum``
        self.processors: dict[int, LogitsProcessor] = {}  # by flag, in the order in which they are applied
        self.groups = [RANDOM]  # flags of parts that run on a subset of the rows
        self._filters = 0  # flags of the processors after the temperature
        self._upload = Uploader(device)
        self._flags = np.zeros(max_running_requests + 1, np.int32)
        self.params = torch.zeros(max_running_requests + 1, len(Param), dtype=torch.int32, device=device)
        self._hashes: Tensor | None = None  # `token_hashes`, made for the first request that is not greedy

    def add(self, processor: LogitsProcessor) -> None:
        """Add a processor, before the first request."""
        flag = processor.flag = self.groups[-1] << 1
        self.groups.append(flag)
        processors = {**self.processors, flag: processor}
        self.processors = dict(sorted(processors.items(), key=lambda item: item[1].order))
        if processor.after_temperature:
            self._filters |= flag

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Store the sampling parameters of newly admitted requests in their request-pool rows."""
        if not admissions:
            return
        ints = np.zeros((len(admissions), len(Param)), np.int32)
        floats = ints.view(np.float32)
        for i, admission in enumerate(admissions):
            p = admission.params
            if not p.greedy:
                ints[i, Param.SEED_LOW], ints[i, Param.SEED_HIGH] = seed_key(admission.seed)
            floats[i, Param.TEMPERATURE] = max(p.temperature, MIN_TEMPERATURE) if not p.greedy else 1.0
            self._flags[admission.req_pool_idx] = self._flags_of(p)
        host_indices = np.array([admission.req_pool_idx for admission in admissions], np.int32)
        req_pool_indices, rows = self._upload([host_indices, ints])
        self.params.index_copy_(0, req_pool_indices.long(), rows)
        for flag, processor in self.processors.items():
            if used := [admission for admission in admissions if self._flags[admission.req_pool_idx] & flag]:
                processor.admit(used)

    def plan(self, req_pool_indices: I32) -> SamplePlan:
        """Plan the sampling of rows of logits that belong to the requests in ``req_pool_indices`` [rows]."""
        flags = self._flags[req_pool_indices]
        union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        rows: dict[int, I32] = {}
        if union:
            common = int(np.bitwise_and.reduce(flags))
            rows = {g: np.flatnonzero(flags & g).astype(np.int32) for g in self.groups if union & ~common & g}
        return SamplePlan(union, rows, req_pool_indices if union & PROCESSORS else None)

    def sample(self, logits: Tensor, inputs: SamplingInputs, masks: TokenMasks | None = None) -> Tensor:
        """Choose a token for each row of ``logits`` [rows, vocab]. Returns int64 [rows].

        The logits are in the model's dtype and may be overwritten. The order is vLLM's: processors such as bias and
        penalties, ``masks``, temperature, processors such as top-k, top-p and min-p. (vLLM applies masks before bias
        and penalties. The tokens are the same, because a logit that is -inf stays so.) Call `commit` afterwards.
        """
        plan = inputs.plan
        if plan.flags & ~RANDOM:  # logits processors compute in float32
            logits = logits.float()
        if plan.flags & PROCESSORS:
            logits = self._process(logits, inputs, after_temperature=False)
        if masks is not None and len(masks.positions):
            self.mask_tokens(logits, *self._upload([masks.positions, masks.bits]))
        return self._draw(logits, inputs) if plan.flags & RANDOM else self.argmax(logits)

    def commit(self, tokens: Tensor, inputs: SamplingInputs, accepted: Accepted | None) -> dict[str, Tensor]:
        """Tell the processors of the step which of the sampled ``tokens`` [rows] count.

        ``accepted`` is the result of ``inputs.verification``; None: every token counts. Returns what the processors add
        to the step's result.
        """
        added: dict[str, Tensor] = {}
        if inputs.plan.flags & PROCESSORS:
            for flag, processor in self.processors.items():
                if inputs.plan.flags & flag:
                    added |= processor.commit(tokens, inputs, accepted, inputs.groups.get(flag)) or {}
        return added

    def _flags_of(self, p: SamplingParams) -> int:
        flags = 0 if p.greedy else RANDOM
        for flag, processor in self.processors.items():
            asked = any(getattr(p, name) != getattr(_DEFAULT, name) for name in processor.parameters)
            if asked and not (processor.after_temperature and p.greedy) and processor.serves(p):
                flags |= flag
        return flags

    # ---- the choice -----------------------------------------------------------------------------

    # In these methods ``rows`` are the rows of logits in a group, as `SamplePlan.rows` has them; None: all rows.

    def _process(self, logits: Tensor, inputs: SamplingInputs, *, after_temperature: bool) -> Tensor:
        """Apply the processors that rows of the step use: those that come after the temperature, or all others."""
        for flag, processor in self.processors.items():
            if inputs.plan.flags & flag and processor.after_temperature == after_temperature:
                rows = inputs.groups.get(flag)
                logits = replace_rows(logits, rows, processor.apply(select_rows(logits, rows), inputs, rows))
        return logits

    def _draw(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Return tokens int64 [rows]: the argmax for a greedy row, a Gumbel-max sample for every other row."""
        _, req_pool_indices, positions, plan, groups, _ = inputs
        if self._hashes is None:
            self._hashes = token_hashes(self.vocab_size, self.device)
        # Without processors after the temperature, `draw` divides by the temperature while it reads the logits.
        filtered = bool(plan.flags & self._filters)
        if filtered:
            params = self.params.index_select(0, req_pool_indices)
            logits = logits / params[:, Param.TEMPERATURE, None].view(torch.float32)
            logits = self._process(logits, inputs, after_temperature=True)
        rows = groups.get(RANDOM)
        keys = (select_rows(req_pool_indices, rows), select_rows(positions, rows))
        drawn = self.draw(select_rows(logits, rows), self.params, *keys, self._hashes, scaled=not filtered)
        return drawn if rows is None else self.argmax(logits).index_copy_(0, rows.long(), drawn)


def select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the given rows of x. None: return x itself."""
    return x if rows is None else x.index_select(0, rows)


def replace_rows(x: Tensor, rows: Tensor | None, part: Tensor) -> Tensor:
    """Write ``part`` over the given rows of x and return x. None: return ``part``, which then has all rows."""
    return part if rows is None else x.index_copy_(0, rows.long(), part)
