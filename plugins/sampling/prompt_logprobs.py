"""Log-probabilities of prompt tokens, computed in blocks of positions.

The logits of a chunk of 8,192 tokens with a vocabulary of 151,936 would be 5 GB in float32. So logits are computed for
a few positions at a time, and only the log-probabilities that are asked for stay on the device. The scheduler says
which positions: `PromptRange`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import I32, Logprobs, PromptRange, Step, StepResult
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner, StepRunner

F32 = npt.NDArray[np.float32]

BLOCK_BYTES = 64 << 20
"""Largest size in bytes of the float32 logits of one block."""


@hookimpl
def minisgl_wrap_runner() -> Any:
    def wrap(runner: StepRunner, model_runner: ModelRunner) -> StepRunner:
        model_runner.scorer = scorer = PromptScorer(model_runner)
        model_runner.readers["prompt_chosen"] = scorer.read
        return runner

    return wrap


class PromptScorer:
    """Scores the prompts of one rank's steps, from hidden states beside those to sample after: `ModelRunner.scorer`."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner

    def indices(self, step: Step) -> Tensor:
        """Return the indices in the step of the positions whose logits score tokens: int32, on the device."""
        (indices,) = self._runner.inputs.upload([token_indices(step)])
        return indices

    def score(self, step: Step, hidden: Tensor) -> dict[str, Tensor]:
        """Return the log-probabilities that the step's ranges ask for, by name. Every rank makes this call.

        ``hidden`` [indices, hidden] are the hidden states of `indices`.
        """
        runner, num_top = self._runner, max(each.num_top for each in step.prompt_logprobs)
        (targets,) = runner.inputs.upload([np.concatenate([each.targets for each in step.prompt_logprobs])])
        log_sum_exp = runner.sampler.log_sum_exp
        return score_prompt(hidden, targets, num_top, runner.model.logits, log_sum_exp, runner.spec.vocab_size)

    def read(self, step: Step, result: StepResult, arrays: Mapping[str, npt.NDArray[Any]]) -> StepResult:
        """Return the result with the log-probabilities of the prompts."""
        top, top_ids = arrays.get("prompt_top"), arrays.get("prompt_top_ids")
        entries = read_prompt_logprobs(step.prompt_logprobs, arrays["prompt_chosen"], top, top_ids)
        return result._replace(prompt_logprobs=entries)


def token_indices(step: Step) -> I32:
    """Return the index in the step of each position that scores a token: those of all its ranges, in order."""
    begin = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens - step.num_computed_tokens
    indices = [begin[r.row] + r.first_position + np.arange(len(r.targets)) for r in step.prompt_logprobs]
    return np.concatenate(indices).astype(np.int32)


def score_prompt(
    hidden: Tensor,
    targets: Tensor,
    num_top: int,
    logits_of: Callable[[Tensor], Tensor],
    log_sum_exp: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> dict[str, Tensor]:
    """Return the log-probabilities of ``targets`` int32 [positions] and of the ``num_top`` most likely tokens, by name.

    ``hidden`` [positions, hidden] are the hidden states of the positions. ``logits_of`` returns the logits [rows,
    vocab] of hidden states [rows, hidden]; it is called for at most `BLOCK_BYTES` of logits. With several ranks every
    rank must make this call, because ``logits_of`` is a collective. ``log_sum_exp`` turns [rows, vocab] into [rows, 1].
    """
    block = max(1, BLOCK_BYTES // (4 * vocab_size))
    chosen, top, top_ids = [], [], []
    for part, some in zip(hidden.split(block), targets.split(block), strict=True):
        logits = logits_of(part).float()
        total = log_sum_exp(logits)
        chosen.append((logits.gather(1, some.long()[:, None]) - total).squeeze(1))
        if num_top:
            values, ids = logits.topk(num_top, dim=1)
            top.append(values - total)
            top_ids.append(ids.int())
    scores = {"prompt_chosen": torch.cat(chosen)}
    if num_top:
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
