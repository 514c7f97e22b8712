"""Chooses each row's next token from its logits, on the device, for all rows at once and without waiting for it.

Knows the sampling state of each slot, which changes only where a step seats a request or samples a token, in step
order. What a row gets depends on its own logits, parameters, seed and position, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import I32, I64, Admission, Logprobs, SamplingParams
from minisgl.engine import logits_processors as filters
from minisgl.engine.gumbel import argmax, draw, seed_key, token_hashes
from minisgl.engine.transfer import Uploader

Reals = npt.NDArray[np.float32]

# What a slot's request asks for, as bits.
RANDOM, NARROW, WIDE, MIN_P, PENALTY, BIAS, LOGPROBS = (1 << i for i in range(7))
GROUPS = (RANDOM, NARROW, WIDE, PENALTY, BIAS, LOGPROBS)  # those that work on a part of the rows

COLDEST = 1e-5  # a lower temperature would overflow float32; the difference to greedy is nil


class SamplePlan(NamedTuple):
    """Which rows ask for what: decided on the host, before the logits exist."""

    flags: int  # or'ed over all rows
    rows: dict[int, I32]  # group -> its rows; a group that all rows are in is left out
    alternatives: I32 | None = None  # [rows]: how many each wants reported; -1: no log-probabilities


class Sampled(NamedTuple):
    """On the device: ``tokens`` int64 [rows], and for the rows of the logprobs group what they asked for."""

    tokens: Tensor
    chosen: Tensor | None = None  # float32 [group]
    top: Tensor | None = None  # float32 [group, MAX_LOGPROBS], best first
    top_ids: Tensor | None = None  # int64 [group, MAX_LOGPROBS]


def read_logprobs(plan: SamplePlan, chosen: Reals, top: Reals, top_ids: I64) -> list[Logprobs | None]:
    """The host's form of what `Sampler.sample` found for the logprobs group: one entry for each row of the plan."""
    assert plan.alternatives is not None
    found: list[Logprobs | None] = [None] * len(plan.alternatives)
    for i, row in enumerate(np.flatnonzero(plan.alternatives >= 0)):
        k = int(plan.alternatives[row])
        found[row] = Logprobs(float(chosen[i]), tuple(top_ids[i, :k].tolist()), tuple(top[i, :k].tolist()))
    return found


class Sampler:
    """The sampling state of ``max_slots`` slots (and the scratch slot), and the choice of tokens."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self._upload = Uploader(device)
        self._flags = np.zeros(max_slots + 1, np.uint8)
        self._alternatives = np.full(max_slots + 1, -1, np.int32)
        # One row a slot: seed key (2); temperature, top_p, min_p, repetition, presence, frequency as float32; top_k.
        self._table = torch.zeros(max_slots + 1, 9, dtype=torch.int32, device=device)
        self._hashes: Tensor | None = None  # from the first random row on
        # From the first penalty on: in the prompt, bool, and times in the output, int32; both [slots, vocab].
        self._history: tuple[Tensor, Tensor] | None = None
        # From the first logit bias on: token ids, int64, and what to add, float32; both [slots, k].
        self._bias: tuple[Tensor, Tensor] | None = None

    def admit(self, seats: Sequence[Admission]) -> None:
        """Take over the parameters of newly seated requests."""
        if not seats:
            return
        ints = np.zeros((len(seats), 9), np.int32)
        reals = ints.view(np.float32)
        for i, seat in enumerate(seats):
            p = seat.params
            ints[i, 0], ints[i, 1] = seed_key(seat.seed)
            ints[i, 8] = p.top_k if 0 < p.top_k < self.vocab_size else 0
            reals[i, 2:8] = (
                max(p.temperature, COLDEST) if not p.greedy else 1.0,
                p.top_p,
                p.min_p,
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
            self._flags[seat.req_pool_idx] = self._flags_of(p)
            self._alternatives[seat.req_pool_idx] = -1 if p.logprobs is None else p.logprobs
        slots, rows = self._upload([np.array([s.req_pool_idx for s in seats], np.int32), ints])
        self._table.index_copy_(0, slots.long(), rows)
        for seat in seats:
            if seat.params.needs_history:
                self._admit_history(seat)
            if seat.params.logit_bias:
                self._admit_bias(seat)

    def plan(self, slots: I32) -> SamplePlan:
        """What the sampled rows, given by their slots [rows], ask for."""
        flags = self._flags[slots]
        union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        rows: dict[int, I32] = {}
        if union:
            common = int(np.bitwise_and.reduce(flags))
            rows = {g: np.flatnonzero(flags & g).astype(np.int32) for g in GROUPS if union & ~common & g}
        return SamplePlan(union, rows, self._alternatives[slots] if union & LOGPROBS else None)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, plan: SamplePlan, groups: dict[int, Tensor]
    ) -> Sampled:
        """Choose a token for each row.

        ``logits`` [rows, vocab] in the model's dtype (may be overwritten); ``slots`` and ``positions`` (of the token
        being chosen) int32 [rows]; ``groups`` is ``plan.rows`` on the device.
        """
        if not plan.flags:
            return Sampled(argmax(logits))
        if plan.flags & ~RANDOM:  # what changes logits, or reports them, does so in float32
            logits = logits.float()
        raw = _take(logits, groups.get(LOGPROBS)).clone() if plan.flags & LOGPROBS else None
        if plan.flags & BIAS:
            logits = self._add_bias(logits, slots, groups.get(BIAS))
        if plan.flags & PENALTY:
            logits = self._penalise(logits, slots, groups.get(PENALTY))
        if plan.flags & RANDOM:
            tokens = self._draw(logits, slots, positions, plan, groups)
        else:
            tokens = argmax(logits)
        if plan.flags & PENALTY:
            self._count(tokens, slots, groups.get(PENALTY))
        if raw is None:
            return Sampled(tokens)
        # The model's own distribution, before bias, penalties and temperature, as vLLM reports it by default.
        top, top_ids = raw.topk(min(SamplingParams.MAX_LOGPROBS, self.vocab_size), dim=1)
        total = raw.logsumexp(dim=1, keepdim=True)
        chosen = raw.gather(1, _take(tokens, groups.get(LOGPROBS))[:, None])
        return Sampled(tokens, (chosen - total).squeeze(1), top - total, top_ids)

    # ---- state ----------------------------------------------------------------------------------

    def _flags_of(self, p: SamplingParams) -> int:
        flags = 0
        if not p.greedy:
            flags |= RANDOM
            if 0 < p.top_k <= filters.NARROW and p.top_k < self.vocab_size:
                flags |= NARROW
            elif 0 < p.top_k < self.vocab_size or p.top_p < 1.0:
                flags |= WIDE
            flags |= MIN_P if p.min_p > 0.0 else 0
        flags |= PENALTY if p.needs_history else 0
        flags |= BIAS if p.logit_bias else 0
        flags |= LOGPROBS if p.logprobs is not None else 0
        return flags

    def _admit_history(self, seat: Admission) -> None:
        if self._history is None:
            shape = (len(self._flags), self.vocab_size)
            self._history = (
                torch.zeros(shape, dtype=torch.bool, device=self.device),
                torch.zeros(shape, dtype=torch.int32, device=self.device),
            )
        empty = np.empty(0, np.int32)
        prompt, output = self._upload([empty if t is None else t for t in (seat.prompt_ids, seat.output_ids)])
        self._history[0][seat.req_pool_idx].zero_().index_fill_(0, prompt.long(), True)
        self._history[1][seat.req_pool_idx].zero_().index_add_(0, output.long(), torch.ones_like(output))

    def _admit_bias(self, seat: Admission) -> None:
        bias = seat.params.logit_bias
        width = 0 if self._bias is None else self._bias[0].shape[1]
        if len(bias) > width:
            wider = 1 << (len(bias) - 1).bit_length()
            ids = torch.zeros(len(self._flags), wider, dtype=torch.int64, device=self.device)
            values = torch.zeros(len(self._flags), wider, dtype=torch.float32, device=self.device)
            if self._bias is not None:
                ids[:, :width], values[:, :width] = self._bias
            self._bias, width = (ids, values), wider
        packed = np.zeros((2, width), np.int32)
        packed[0, : len(bias)] = list(bias)
        packed.view(np.float32)[1, : len(bias)] = list(bias.values())
        (new,) = self._upload([packed])
        assert self._bias is not None
        self._bias[0][seat.req_pool_idx] = new[0]
        self._bias[1][seat.req_pool_idx] = new[1].view(torch.float32)

    # ---- the choice -----------------------------------------------------------------------------

    def _reals(self, slots: Tensor) -> Tensor:
        """float32 [6, rows]: temperature, top_p, min_p, repetition, presence, frequency."""
        return self._table[:, 2:8].index_select(0, slots).view(torch.float32).T

    def _add_bias(self, logits: Tensor, slots: Tensor, rows: Tensor | None) -> Tensor:
        assert self._bias is not None
        slots = _take(slots, rows)
        ids, values = (table.index_select(0, slots) for table in self._bias)
        return _put(logits, rows, filters.add_bias(_take(logits, rows), ids, values))

    def _penalise(self, logits: Tensor, slots: Tensor, rows: Tensor | None) -> Tensor:
        assert self._history is not None
        slots = _take(slots, rows)
        prompt, counts = (table.index_select(0, slots) for table in self._history)
        return _put(logits, rows, filters.penalise(_take(logits, rows), prompt, counts, *self._reals(slots)[3:]))

    def _count(self, tokens: Tensor, slots: Tensor, rows: Tensor | None) -> None:
        assert self._history is not None
        slots, tokens = _take(slots, rows).long(), _take(tokens, rows)
        one = torch.ones((), dtype=torch.int32, device=self.device).expand(len(tokens))
        self._history[1].index_put_((slots, tokens), one, accumulate=True)

    def _draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, plan: SamplePlan, groups: dict[int, Tensor]
    ) -> Tensor:
        """Tokens int64 [rows]: the likeliest for a greedy row, drawn by the Gumbel-max trick for the others."""
        if self._hashes is None:
            self._hashes = token_hashes(self.vocab_size, self.device)
        filtered = bool(plan.flags & (NARROW | WIDE | MIN_P))  # without a filter, the draw scales as it reads
        if filtered:
            temperature, top_p, min_p = self._reals(slots)[:3]
            logits = logits / temperature[:, None]
            threshold = filters.min_p_threshold(logits, min_p)
            top_k = self._table[:, 8].index_select(0, slots)
            for group, width in ((NARROW, min(filters.NARROW, self.vocab_size)), (WIDE, self.vocab_size)):
                if plan.flags & group:
                    rows = groups.get(group)
                    part = filters.top_k_p_threshold(_take(logits, rows), _take(top_k, rows), _take(top_p, rows), width)
                    threshold = _put(threshold, rows, torch.maximum(part, _take(threshold, rows)))
            filters.keep_from(logits, threshold)
        rows = groups.get(RANDOM)
        who = (_take(slots, rows), _take(positions, rows))
        drawn = draw(_take(logits, rows), self._table, *who, self._hashes, scaled=not filtered)
        return drawn if rows is None else argmax(logits).index_copy_(0, rows.long(), drawn)


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    """The given rows of x; None: all of them, as they are."""
    return x if rows is None else x.index_select(0, rows)


def _put(x: Tensor, rows: Tensor | None, part: Tensor) -> Tensor:
    """x with the given rows replaced."""
    return part if rows is None else x.index_copy_(0, rows.long(), part)
