"""Penalties on tokens that occurred before: ``repetition_penalty``, ``presence_penalty`` and ``frequency_penalty``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minisgl.config import Config
from minisgl.core import Admission
from minisgl.engine.inputs import Accepted, SamplingInputs, Uploader
from minisgl.engine.logits_processors import LogitsProcessor
from minisgl.engine.sampler import select_rows
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner, StepRunner


@hookimpl
def minisgl_wrap_runner(config: Config, vocab_size: int, device: torch.device) -> Any:
    processor = Penalties(config.max_running_requests, vocab_size, device)

    def wrap(runner: StepRunner, model_runner: ModelRunner) -> StepRunner:
        if model_runner.rank == 0:  # the large table of other ranks, which do not sample, is freed
            model_runner.sampler.add(processor)
        return runner

    return wrap


def apply_penalties(logits: Tensor, history: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Lower the logits of tokens that occurred before. Penalties below 1 (repetition) or 0 (the others) raise them.

    ``history`` int32 [rows, vocab] is twice the number of occurrences in the output, plus 1 if the token occurs in the
    prompt. The repetition penalty (Keskar et al., "CTRL", 2019) applies to tokens of prompt and output. The presence
    and frequency penalties apply to tokens of the output only, as OpenAI defines them. A logit that is -inf stays -inf.
    """
    scale = torch.where(history > 0, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    counts = history >> 1
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


class Penalties(LogitsProcessor):
    """Keeps the penalties and the history of each request-pool row."""

    parameters = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    order = 20

    def __init__(self, max_running_requests: int, vocab_size: int, device: torch.device):
        rows = max_running_requests + 1
        self._upload = Uploader(device)
        self._penalties = torch.zeros((rows, len(self.parameters)), dtype=torch.float32, device=device)
        # As `apply_penalties` reads it. A row is written when a request with a penalty is admitted; without one, a CPU
        # never commits the memory.
        self.history = torch.empty((rows, vocab_size), dtype=torch.int32, device=device)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Store the penalties of newly admitted requests, and which tokens their prompts and outputs contain."""
        rows = np.array([admission.req_pool_idx for admission in admissions], np.int32)
        values = np.array([[getattr(a.params, name) for name in self.parameters] for a in admissions], np.float32)
        indices, bits = self._upload([rows, values.view(np.int32)])
        self._penalties.index_copy_(0, indices.long(), bits.view(torch.float32))
        empty = np.empty(0, np.int32)
        for admission in admissions:
            ids = (admission.prompt_ids, admission.output_ids)
            prompt, output = self._upload([empty if tokens is None else tokens for tokens in ids])
            history = self.history[admission.req_pool_idx].zero_().index_fill_(0, prompt.long(), 1)
            history.index_add_(0, output.long(), torch.full_like(output, 2))

    def apply(self, logits: Tensor, inputs: SamplingInputs, rows: Tensor | None) -> Tensor:
        """Apply the penalties. A row after draft tokens sees these drafts as output, as if they had been sampled."""
        req_pool_indices = select_rows(inputs.req_pool_indices, rows)
        history = self.history.index_select(0, req_pool_indices)
        if inputs.verification is not None:
            inputs.verification.add_drafts(history, rows)
        return apply_penalties(logits, history, *self._penalties.index_select(0, req_pool_indices).T)

    def commit(self, tokens: Tensor, inputs: SamplingInputs, accepted: Accepted | None, rows: Tensor | None) -> None:
        """Add the tokens that count to the histories of their requests."""
        req_pool_indices, own = select_rows(inputs.req_pool_indices, rows).long(), select_rows(tokens, rows)
        if accepted is None or inputs.verification is None:
            added = torch.full((), 2, dtype=torch.int32, device=own.device).expand(len(own))
        else:
            added = select_rows(inputs.verification.counts(accepted), rows).int() * 2
        self.history.index_put_((req_pool_indices, own), added, accumulate=True)
