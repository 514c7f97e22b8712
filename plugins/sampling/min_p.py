"""Min-p: of a request's tokens, only those that are ``min_p`` times as likely as the most likely one, or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minisgl.config import Config
from minisgl.core import Admission
from minisgl.engine.inputs import SamplingInputs, Uploader
from minisgl.engine.logits_processors import LogitsProcessor
from minisgl.engine.sampler import select_rows
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner, StepRunner


@hookimpl
def minisgl_wrap_runner(config: Config, device: torch.device) -> Any:
    processor = MinP(config.max_running_requests, device)

    def wrap(runner: StepRunner, model_runner: ModelRunner) -> StepRunner:
        model_runner.sampler.add(processor)
        return runner

    return wrap


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """Return the logit [rows, 1] of a token that is ``min_p`` [rows] times as likely as the most likely token.

    Source: Nguyen et al., "Turning up the heat: min-p sampling", 2024.
    """
    return logits.amax(dim=1, keepdim=True) + min_p.log()[:, None]


class MinP(LogitsProcessor):
    """Masks the tokens below the threshold. It keeps ``min_p`` of each request-pool row."""

    parameters = ("min_p",)
    order = 80
    after_temperature = True

    def __init__(self, max_running_requests: int, device: torch.device):
        self._upload = Uploader(device)
        self._min_p = torch.zeros(max_running_requests + 1, dtype=torch.float32, device=device)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Store the parameter of newly admitted requests."""
        rows = np.array([admission.req_pool_idx for admission in admissions], np.int32)
        values = np.array([admission.params.min_p for admission in admissions], np.float32)
        indices, bits = self._upload([rows, values.view(np.int32)])
        self._min_p.index_copy_(0, indices.long(), bits.view(torch.float32))

    def apply(self, logits: Tensor, inputs: SamplingInputs, rows: Tensor | None) -> Tensor:
        """Set the logits of tokens that are too unlikely to -inf."""
        min_p = self._min_p.index_select(0, select_rows(inputs.req_pool_indices, rows))
        return logits.masked_fill_(logits < min_p_threshold(logits, min_p), -torch.inf)
