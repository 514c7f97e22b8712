"""Verification of draft tokens: which of the tokens that a row sampled at several positions count.

A verification row samples after its first token and after each draft token. A sampled token should equal the draft
token that follows. The sampled tokens count up to, and including, the first one that does not (speculative decoding:
Leviathan et al., 2022). All work is done on the device, so the host does not wait. The module knows steps and tokens,
and no logits. The engine loads it at its start: drafts also come from grammars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core import I32, Step
from minisgl.engine.inputs import Accepted, InputBuilder, SamplePlan, SamplingInputs
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner, StepRunner


@hookimpl
def minisgl_wrap_runner() -> Any:
    def wrap(runner: StepRunner, model_runner: ModelRunner) -> StepRunner:
        model_runner.inputs.verifying_inputs = verifying_inputs
        return runner

    return wrap


class DraftVerification(NamedTuple):
    """Which tokens count in a step with rows that sample at several positions: `SamplingInputs.verification`.

    The fields have the rows of the step that sample, each padded to k sampled positions, as tensors on the device.

    k is the largest number of sampled positions of a row. A row that verifies nothing has one sampled position and no
    draft. Sampled positions are numbered over all rows, in order.
    """

    req_pool_indices: Tensor  # int32 [rows], no index twice
    positions: Tensor  # int32 [rows, k] numbers of the row's sampled positions; padding repeats the last one
    drafts: Tensor  # int32 [rows, k] the draft token after each of these positions; -1: there is none
    row: Tensor  # int32 [positions] row of each sampled position
    offset: Tensor  # int32 [positions] how many sampled positions of the same row are before it

    def accept(self, tokens: Tensor) -> Accepted:
        """Compare the sampled ``tokens`` int64 [positions] with the drafts.

        A row's length is 1 + the number of its leading drafts that equal the token sampled before them. Every rank gets
        the same result from the same tokens.
        """
        sampled = tokens.index_select(0, self.positions.flatten()).view(self.positions.shape)
        length = (sampled == self.drafts).cumprod(1).sum(1) + 1
        return Accepted(length, sampled.gather(1, length[:, None] - 1).squeeze(1))

    def counts(self, accepted: Accepted) -> Tensor:
        """Return whether the token of each sampled position counts, bool [positions]."""
        return self.offset < accepted.length.index_select(0, self.row)

    def add_drafts(self, history: Tensor, rows: Tensor | None) -> None:
        """Count, in ``history``, the drafts of the same row before each sampled position as output tokens.

        ``history`` int32 [rows, vocab] is as in `minisgl.plugins.sampling.penalties.apply_penalties` and is changed in
        place. Its rows are the sampled positions in ``rows``, int32; None: all.
        """
        row, offset = (self.row, self.offset) if rows is None else (x.index_select(0, rows) for x in self[3:])
        before = torch.arange(self.drafts.shape[1] - 1, dtype=torch.int32, device=history.device) < offset[:, None]
        drafts = self.drafts[:, :-1].index_select(0, row).clamp_(min=0)
        history.scatter_add_(1, drafts.long(), before.int() * 2)


def verifying_inputs(builder: InputBuilder, step: Step, plan: SamplePlan) -> SamplingInputs:
    """Build the inputs of sampling for a step in which rows may sample at several positions."""
    verification = verification_arrays(step)
    row, offset = verification[3:]
    counts, ends = step.num_sampled_tokens[step.sample], step.num_computed_tokens + step.num_scheduled_tokens
    first_indices = np.cumsum(step.num_scheduled_tokens, dtype=np.int32)[step.sample] - counts
    first_positions = ends[step.sample] - counts + np.int32(1)
    host = [first_indices[row] + offset, step.req_pool_indices[step.sample][row], first_positions[row] + offset]
    indices, req_pool_indices, positions, *more = builder.upload([*host, *verification, *plan.rows.values()])
    groups = dict(zip(plan.rows, more[len(verification) :], strict=True))
    made = DraftVerification(*more[: len(verification)])
    return SamplingInputs(indices, req_pool_indices, positions, plan, groups, made)


def verification_arrays(step: Step) -> list[I32]:
    """Return the fields of the step's `DraftVerification` as host arrays."""
    sample = step.sample
    counts = step.num_sampled_tokens[sample]
    begin = np.cumsum(counts, dtype=np.int32) - counts
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    offset = np.arange(len(row), dtype=np.int32) - begin[row]
    k = np.arange(counts.max(), dtype=np.int32)
    positions = np.minimum(k, counts[:, None] - 1) + begin[:, None]
    first = np.cumsum(step.num_scheduled_tokens, dtype=np.int32)[sample] - counts  # token of the first sampled position
    after = np.minimum(first[:, None] + 1 + k, len(step.input_ids) - 1)
    drafts = np.where(k < counts[:, None] - 1, step.input_ids[after], np.int32(-1))
    return [step.req_pool_indices[sample], positions, drafts, row, offset]
