"""Log-probabilities of prompt tokens, computed in blocks of positions.

The logits of a chunk of 8,192 tokens with a vocabulary of 151,936 would be 5 GB in float32. So logits are computed for
a few positions at a time, and only the log-probabilities that are asked for stay on the device. The module knows steps
and hidden states, and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import I32, Logprobs, PromptRange, Step

__all__ = ["PromptPositions", "prompt_arrays", "read_prompt_logprobs", "score_prompt"]

F32 = npt.NDArray[np.float32]

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
    hidden: Tensor,
    prompt: PromptPositions,
    logits_of: Callable[[Tensor], Tensor],
    log_sum_exp: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> dict[str, Tensor]:
    """Return the log-probabilities of the targets and of the most likely tokens, by their names in a download.

    ``hidden`` [positions, hidden] are the hidden states of the positions. ``logits_of`` returns the logits [rows,
    vocab] of hidden states [rows, hidden]; it is called for at most `BLOCK_BYTES` of logits. With several ranks every
    rank must make this call, because ``logits_of`` is a collective. ``log_sum_exp`` turns [rows, vocab] into [rows, 1].
    """
    block = max(1, BLOCK_BYTES // (4 * vocab_size))
    chosen, top, top_ids = [], [], []
    for part, targets in zip(hidden.split(block), prompt.targets.split(block), strict=True):
        logits = logits_of(part).float()
        total = log_sum_exp(logits)
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
