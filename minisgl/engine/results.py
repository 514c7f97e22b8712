"""The result of a step: the arrays that it left on the device become a `StepResult`. Also the scores of prompts.

The logits of a chunk of 8,192 tokens with a vocabulary of 151,936 would be 5 GB in float32. So the log-probabilities of
prompt tokens are computed for a few positions at a time, and only those that are asked for stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import I32, I64, Logprobs, PromptRange, Step, StepResult

if TYPE_CHECKING:
    from minisgl.engine.inputs import SamplePlan

F32 = npt.NDArray[np.float32]


def read_result(step: Step, plan: SamplePlan | None, arrays: Mapping[str, npt.NDArray[Any]]) -> StepResult:
    """Return the result of ``step``.

    ``arrays`` are by name: the fields of `Sampled` (none if no row samples), ``accepted`` int64 with one entry for each
    row that samples (only if a row verifies), and the result of `score_prompt` (only if the step scores prompts).
    ``plan`` is the plan of sampling; None if no row samples.
    """
    tokens, accepted = _read_tokens(step, arrays)
    logprobs = None
    if plan is not None and "chosen" in arrays:
        entries = read_logprobs(plan, arrays["chosen"], arrays["top"], arrays["top_ids"])
        logprobs = _read_row_logprobs(step, accepted, entries)
    prompt: tuple[tuple[Logprobs, ...], ...] = ()
    if "prompt_chosen" in arrays:
        top, top_ids = arrays.get("prompt_top"), arrays.get("prompt_top_ids")
        prompt = read_prompt_logprobs(step.prompt_logprobs, arrays["prompt_chosen"], top, top_ids)
    return StepResult(step.id, tokens, accepted, logprobs, prompt)


def _read_tokens(step: Step, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[I32, I32]:
    """Return ``tokens`` and ``accepted`` of a `StepResult`. Tokens that do not count are 0."""
    counts = step.num_sampled_tokens
    if "accepted" not in arrays:
        sampled = arrays.get("tokens")
        if sampled is not None and len(sampled) == step.rows:
            return sampled.astype(np.int32)[:, None], counts.copy()
        tokens = np.zeros((step.rows, 1), np.int32)
        if sampled is not None:
            tokens[step.sample, 0] = sampled
        return tokens, counts.copy()
    accepted = np.zeros(step.rows, np.int32)
    accepted[step.sample] = arrays["accepted"]
    tokens = np.zeros((step.rows, counts.max()), np.int32)
    k = np.arange(tokens.shape[1])
    tokens[k < counts[:, None]] = arrays["tokens"]
    tokens[k >= accepted[:, None]] = 0
    return tokens, accepted


def read_logprobs(plan: SamplePlan, chosen: F32, top: F32, top_ids: I64) -> list[Logprobs | None]:
    """Convert the log-probabilities of a `Sampled`, as host arrays, into one entry for each row of the plan.

    The entry is None for a row that did not ask for log-probabilities.
    """
    assert plan.alternatives is not None
    entries: list[Logprobs | None] = [None] * len(plan.alternatives)
    for i, row in enumerate(np.flatnonzero(plan.alternatives >= 0)):
        k = int(plan.alternatives[row])
        entries[row] = Logprobs(float(chosen[i]), tuple(top_ids[i, :k].tolist()), tuple(top[i, :k].tolist()))
    return entries


def _read_row_logprobs(
    step: Step, accepted: I32, entries: list[Logprobs | None]
) -> tuple[tuple[Logprobs, ...] | None, ...]:
    """Return the log-probabilities of each row's accepted tokens. ``entries`` has one for each sampled position."""
    ends = np.cumsum(step.num_sampled_tokens)
    rows: list[tuple[Logprobs, ...] | None] = []
    for begin, count in zip((ends - step.num_sampled_tokens).tolist(), accepted.tolist(), strict=True):
        row = tuple(entry for entry in entries[begin : begin + count] if entry is not None)
        rows.append(row or None)
    return tuple(rows)


# ---- prompts ---------------------------------------------------------------------------------------------

BLOCK_BYTES = 64 << 20
"""Largest size in bytes of the float32 logits of one block."""


class PromptPositions(NamedTuple):
    """Positions of a step whose logits score tokens of prompts: of all its `PromptRange`, in order."""

    indices: Tensor  # int32 [positions] index of the position's token in the step
    targets: Tensor  # int32 [positions] the token to score
    num_top: int  # largest number of alternatives that a range asks for


def prompt_arrays(step: Step) -> list[I32]:
    """Return ``indices`` and ``targets`` of the step's `PromptPositions` as host arrays."""
    begin = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens - step.num_computed_tokens
    indices = [begin[r.row] + r.first_position + np.arange(len(r.targets)) for r in step.prompt_logprobs]
    return [np.concatenate(indices).astype(np.int32), np.concatenate([r.targets for r in step.prompt_logprobs])]


def score_prompt(
    hidden: Tensor, prompt: PromptPositions, logits_of: Callable[[Tensor], Tensor], vocab_size: int
) -> dict[str, Tensor]:
    """Return the log-probabilities of the targets and of the most likely tokens, by their names in a download.

    ``hidden`` [positions, hidden] are the hidden states of the positions. ``logits_of`` returns the logits [rows,
    vocab] of hidden states [rows, hidden]; it is called for at most `BLOCK_BYTES` of logits. With several ranks every
    rank must make this call, because ``logits_of`` is a collective.
    """
    block = max(1, BLOCK_BYTES // (4 * vocab_size))
    chosen, top, top_ids = [], [], []
    for part, targets in zip(hidden.split(block), prompt.targets.split(block), strict=True):
        logits = logits_of(part).float()
        total = logits.logsumexp(dim=1, keepdim=True)
        chosen.append((logits.gather(1, targets.long()[:, None]) - total).squeeze(1))
        if prompt.num_top:
            values, ids = logits.topk(prompt.num_top, dim=1)
            top.append(values - total)
            top_ids.append(ids.int())
    scores = {"prompt_chosen": torch.cat(chosen)}
    if prompt.num_top:
        scores |= {"prompt_top": torch.cat(top), "prompt_top_ids": torch.cat(top_ids)}
    return scores


def read_prompt_logprobs(
    ranges: Sequence[PromptRange], chosen: F32, top: F32 | None, top_ids: I32 | None
) -> tuple[tuple[Logprobs, ...], ...]:
    """Convert the result of `score_prompt`, as host arrays, into one tuple of entries for each range."""
    result, a = [], 0
    for r in ranges:
        b = a + len(r.targets)
        if r.num_top and top is not None and top_ids is not None:
            ids, values = top_ids[a:b, : r.num_top].tolist(), top[a:b, : r.num_top].tolist()
            entries = zip(chosen[a:b].tolist(), map(tuple, ids), map(tuple, values), strict=True)
            result.append(tuple(Logprobs(*entry) for entry in entries))
        else:
            result.append(tuple(Logprobs(value) for value in chosen[a:b].tolist()))
        a = b
    return tuple(result)
