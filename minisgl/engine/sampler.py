"""Sampler: chooses a token for each row of logits, on the device, for all rows of a step at once.

A row of logits belongs to one sampled position. Most requests have one in a step; a request whose drafts are verified
has several. The host does not wait for the device. The sampler keeps the sampling state of each request-pool row. This
state changes only when a step admits a request or commits sampled tokens, in the order of the steps. The token of a
row depends on its own logits, parameters, seed, position, mask and (with penalties) earlier tokens, never on other rows
of the batch. SGLang builds a `SamplingBatchInfo` and vLLM a `SamplingMetadata` for each batch instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core import I32, Admission, SamplingParams, TokenMasks
from minisgl.engine import logits_processors
from minisgl.engine.gumbel import Param, draw, seed_key, token_hashes
from minisgl.engine.inputs import SamplePlan, SamplingInputs, Uploader
from minisgl.engine.verification import Accepted

# Flags of a request: which parts of sampling it uses. PARTIAL_SORT: top-k (and top-p) over the PARTIAL_SORT_WIDTH
# largest logits; FULL_SORT: top-k or top-p over the whole vocabulary.
RANDOM, PARTIAL_SORT, FULL_SORT, MIN_P, PENALTY, BIAS, LOGPROBS = (1 << i for i in range(7))
GROUPS = (RANDOM, PARTIAL_SORT, FULL_SORT, PENALTY, BIAS, LOGPROBS)  # parts that run on a subset of the rows

MIN_TEMPERATURE = 1e-5  # lower ones (of rows that are not greedy) are raised to it, or float32 could overflow


class Sampled(NamedTuple):
    """Sampled tokens on the device, and the log-probabilities of the rows in the group LOGPROBS.

    The field names are also the names of these arrays in the download of a step's result.
    """

    tokens: Tensor  # int64 [rows]
    chosen: Tensor | None = None  # float32 [group]: log-probability of the sampled token
    top: Tensor | None = None  # float32 [group, MAX_LOGPROBS]: log-probabilities of the most likely tokens, best first
    top_ids: Tensor | None = None  # int64 [group, MAX_LOGPROBS]: ids of the most likely tokens


def state_bytes(max_running_requests: int, vocab_size: int) -> int:
    """Return the bytes of device memory that a `Sampler` allocates for its state at most.

    The memory of one step, such as its logits in float32, is not part of it.
    """
    per_row = 4 * len(Param) + 4 * vocab_size + (8 + 4) * SamplingParams.MAX_BIAS
    return (max_running_requests + 1) * per_row + 4 * vocab_size


class Sampler:
    """Sampling state of ``max_running_requests`` request-pool rows plus the scratch row, and the choice of tokens.

    Large tables are allocated for the first request that needs them; their size does not depend on the requests.
    `state_bytes` counts all of them.
    """

    def __init__(self, max_running_requests: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        # Faster functions may replace these: see `minisgl.models.converter.Kernels.convert_sampler`.
        self.draw: Callable[..., Tensor] = draw
        self.argmax: Callable[[Tensor], Tensor] = partial(torch.argmax, dim=1)
        self.mask_tokens: Callable[[Tensor, Tensor, Tensor], None] = logits_processors.mask_tokens
        self.top_k_p_threshold: Callable[..., Tensor] = logits_processors.top_k_p_threshold
        self.log_sum_exp: Callable[[Tensor], Tensor] = partial(torch.logsumexp, dim=1, keepdim=True)
        self._upload = Uploader(device)
        self._flags = np.zeros(max_running_requests + 1, np.uint8)
        self._alternatives = np.full(max_running_requests + 1, -1, np.int32)
        self._bias_sizes = np.zeros(max_running_requests + 1, np.int32)  # number of biased tokens
        self.params = torch.zeros(max_running_requests + 1, len(Param), dtype=torch.int32, device=device)
        self._hashes: Tensor | None = None  # `token_hashes`, made for the first request that is not greedy
        # [request-pool rows, vocab] int32: which tokens the prompt and the output contain, as `apply_penalties` reads
        # it. Allocated for the first request with a penalty.
        self._history: Tensor | None = None
        # (token ids, int64; biases to add, float32), both [request-pool rows, MAX_BIAS]; unused columns have bias 0.
        # Allocated for the first request with a logit bias.
        self._bias: tuple[Tensor, Tensor] | None = None

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
            floats[i, Param.TOP_P], floats[i, Param.MIN_P] = p.top_p, p.min_p
            floats[i, Param.REPETITION_PENALTY] = p.repetition_penalty
            floats[i, Param.PRESENCE_PENALTY] = p.presence_penalty
            floats[i, Param.FREQUENCY_PENALTY] = p.frequency_penalty
            ints[i, Param.TOP_K] = p.top_k if 0 < p.top_k < self.vocab_size else 0
            self._flags[admission.req_pool_idx] = self._flags_of(p)
            self._alternatives[admission.req_pool_idx] = -1 if p.logprobs is None else p.logprobs
            self._bias_sizes[admission.req_pool_idx] = len(p.logit_bias)
        host_indices = np.array([admission.req_pool_idx for admission in admissions], np.int32)
        req_pool_indices, rows = self._upload([host_indices, ints])
        self.params.index_copy_(0, req_pool_indices.long(), rows)
        for admission in admissions:
            if admission.params.needs_history:
                self._admit_history(admission)
            if admission.params.logit_bias:
                self._admit_bias(admission)

    def plan(self, req_pool_indices: I32) -> SamplePlan:
        """Plan the sampling of rows of logits that belong to the requests in ``req_pool_indices`` [rows]."""
        flags = self._flags[req_pool_indices]
        union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        rows: dict[int, I32] = {}
        if union:
            common = int(np.bitwise_and.reduce(flags))
            rows = {g: np.flatnonzero(flags & g).astype(np.int32) for g in GROUPS if union & ~common & g}
        alternatives = self._alternatives[req_pool_indices] if union & LOGPROBS else None
        width = int(self._bias_sizes[req_pool_indices].max()) if union & BIAS else 0
        return SamplePlan(union, rows, alternatives, width)

    def sample(self, logits: Tensor, inputs: SamplingInputs, masks: TokenMasks | None = None) -> Sampled:
        """Choose a token for each row of ``logits`` [rows, vocab].

        The logits are in the model's dtype and may be overwritten. The order of the processors is vLLM's: ``masks``,
        bias, penalties, temperature, top-k, top-p, min-p. Call `commit` afterwards.
        """
        plan, groups = inputs.plan, inputs.groups
        if plan.flags & ~RANDOM:  # logits processors and log-probabilities compute in float32
            logits = logits.float()
        raw = _select_rows(logits, groups.get(LOGPROBS)).clone() if plan.flags & LOGPROBS else None
        if masks is not None and len(masks.positions):
            self.mask_tokens(logits, *self._upload([masks.positions, masks.bits]))
        if plan.flags & BIAS:
            logits = self._add_bias(logits, inputs)
        if plan.flags & PENALTY:
            logits = self._apply_penalties(logits, inputs)
        tokens = self._draw(logits, inputs) if plan.flags & RANDOM else self.argmax(logits)
        if raw is None:
            return Sampled(tokens)
        # Log-probabilities are those of the model's own distribution, before masks, bias, penalties and temperature, as
        # vLLM reports them by default (but vLLM reports them after masks).
        top, top_ids = raw.topk(min(SamplingParams.MAX_LOGPROBS, self.vocab_size), dim=1)
        total = self.log_sum_exp(raw)
        chosen = raw.gather(1, _select_rows(tokens, groups.get(LOGPROBS))[:, None])
        return Sampled(tokens, (chosen - total).squeeze(1), top - total, top_ids)

    def commit(self, tokens: Tensor, inputs: SamplingInputs, accepted: Accepted | None) -> None:
        """Add the sampled ``tokens`` [rows] that count to the histories of their requests, for penalties.

        ``accepted`` is the result of ``inputs.verification``; None: every token counts.
        """
        if not inputs.plan.flags & PENALTY:
            return
        assert self._history is not None
        rows = inputs.groups.get(PENALTY)
        req_pool_indices, tokens = _select_rows(inputs.req_pool_indices, rows).long(), _select_rows(tokens, rows)
        if accepted is None or inputs.verification is None:
            added = torch.full((), 2, dtype=torch.int32, device=self.device).expand(len(tokens))
        else:
            added = _select_rows(inputs.verification.counts(accepted), rows).int() * 2
        self._history.index_put_((req_pool_indices, tokens), added, accumulate=True)

    # ---- state ----------------------------------------------------------------------------------

    def _flags_of(self, p: SamplingParams) -> int:
        flags = 0
        if not p.greedy:
            flags |= RANDOM
            if 0 < p.top_k <= logits_processors.PARTIAL_SORT_WIDTH and p.top_k < self.vocab_size:
                flags |= PARTIAL_SORT
            elif 0 < p.top_k < self.vocab_size or p.top_p < 1.0:
                flags |= FULL_SORT
            flags |= MIN_P if p.min_p > 0.0 else 0
        flags |= PENALTY if p.needs_history else 0
        flags |= BIAS if p.logit_bias else 0
        flags |= LOGPROBS if p.logprobs is not None else 0
        return flags

    def _admit_history(self, admission: Admission) -> None:
        """Store which tokens the request's prompt and output contain, for penalties."""
        if self._history is None:
            shape = (len(self._flags), self.vocab_size)
            self._history = torch.zeros(shape, dtype=torch.int32, device=self.device)
        empty = np.empty(0, np.int32)
        prompt, output = self._upload([empty if t is None else t for t in (admission.prompt_ids, admission.output_ids)])
        history = self._history[admission.req_pool_idx].zero_().index_fill_(0, prompt.long(), 1)
        history.index_add_(0, output.long(), torch.full_like(output, 2))

    def _admit_bias(self, admission: Admission) -> None:
        """Store the request's logit bias."""
        if self._bias is None:
            shape = (len(self._flags), SamplingParams.MAX_BIAS)
            self._bias = (
                torch.zeros(shape, dtype=torch.int64, device=self.device),
                torch.zeros(shape, dtype=torch.float32, device=self.device),
            )
        bias = admission.params.logit_bias
        packed = np.empty((2, len(bias)), np.int32)
        packed[0] = list(bias)
        packed.view(np.float32)[1] = list(bias.values())
        (new,) = self._upload([packed])
        ids, values = (table[admission.req_pool_idx] for table in self._bias)
        ids[: len(bias)] = new[0]
        values.zero_()[: len(bias)] = new[1].view(torch.float32)

    # ---- the choice -----------------------------------------------------------------------------

    # In these methods ``rows`` are the rows of logits in a group, as `SamplePlan.rows` has them; None: all rows.

    def _floats(self, req_pool_indices: Tensor, first: Param, last: Param) -> Tensor:
        """Return the columns from ``first`` to ``last`` of the rows' parameters, as float32 [columns, rows]."""
        return self.params[:, first : last + 1].index_select(0, req_pool_indices).view(torch.float32).T

    def _add_bias(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        assert self._bias is not None
        rows = inputs.groups.get(BIAS)
        req_pool_indices = _select_rows(inputs.req_pool_indices, rows)
        ids, values = (table[:, : inputs.plan.bias_width].index_select(0, req_pool_indices) for table in self._bias)
        return _replace_rows(logits, rows, logits_processors.add_bias(_select_rows(logits, rows), ids, values))

    def _apply_penalties(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Apply the penalties. A row after draft tokens sees these drafts as output, as if they had been sampled."""
        assert self._history is not None
        rows = inputs.groups.get(PENALTY)
        req_pool_indices = _select_rows(inputs.req_pool_indices, rows)
        history = self._history.index_select(0, req_pool_indices)
        if inputs.verification is not None:
            inputs.verification.add_drafts(history, rows)
        penalties = self._floats(req_pool_indices, Param.REPETITION_PENALTY, Param.FREQUENCY_PENALTY)
        part = logits_processors.apply_penalties(_select_rows(logits, rows), history, *penalties)
        return _replace_rows(logits, rows, part)

    def _draw(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Return tokens int64 [rows]: the argmax for a greedy row, a Gumbel-max sample for every other row."""
        _, req_pool_indices, positions, plan, groups, _ = inputs
        if self._hashes is None:
            self._hashes = token_hashes(self.vocab_size, self.device)
        # Without top-k, top-p and min-p, `draw` divides by the temperature while it reads the logits.
        filtered = bool(plan.flags & (PARTIAL_SORT | FULL_SORT | MIN_P))
        if filtered:
            temperature, top_p, min_p = self._floats(req_pool_indices, Param.TEMPERATURE, Param.MIN_P)
            logits = logits / temperature[:, None]
            threshold = logits_processors.min_p_threshold(logits, min_p)
            top_k = self.params[:, Param.TOP_K].index_select(0, req_pool_indices)
            partial_width = min(logits_processors.PARTIAL_SORT_WIDTH, self.vocab_size)
            for group, width in ((PARTIAL_SORT, partial_width), (FULL_SORT, self.vocab_size)):
                if plan.flags & group:
                    rows = groups.get(group)
                    part = self.top_k_p_threshold(*(_select_rows(x, rows) for x in (logits, top_k, top_p)), width)
                    threshold = _replace_rows(threshold, rows, torch.maximum(part, _select_rows(threshold, rows)))
            logits_processors.mask_below(logits, threshold)
        rows = groups.get(RANDOM)
        keys = (_select_rows(req_pool_indices, rows), _select_rows(positions, rows))
        drawn = self.draw(_select_rows(logits, rows), self.params, *keys, self._hashes, scaled=not filtered)
        return drawn if rows is None else self.argmax(logits).index_copy_(0, rows.long(), drawn)


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the given rows of x. None: return x itself."""
    return x if rows is None else x.index_select(0, rows)


def _replace_rows(x: Tensor, rows: Tensor | None, part: Tensor) -> Tensor:
    """Write ``part`` over the given rows of x and return x. None: return ``part``, which then has all rows."""
    return part if rows is None else x.index_copy_(0, rows.long(), part)
