"""Logit bias: numbers that are added to the logits of some tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minisgl.config import Config
from minisgl.core import Admission, SamplingParams
from minisgl.engine.inputs import SamplingInputs, Uploader
from minisgl.engine.logits_processors import LogitsProcessor
from minisgl.engine.sampler import select_rows
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner, StepRunner


@hookimpl
def minisgl_wrap_runner(config: Config, device: torch.device) -> Any:
    processor = LogitBias(config.max_running_requests, device)

    def wrap(runner: StepRunner, model_runner: ModelRunner) -> StepRunner:
        model_runner.sampler.add(processor)
        return runner

    return wrap


class LogitBias(LogitsProcessor):
    """Keeps the biased tokens of each request-pool row, at most `SamplingParams.MAX_BIAS`."""

    parameters = ("logit_bias",)
    order = 10  # before the penalties, as in vLLM

    def __init__(self, max_running_requests: int, device: torch.device):
        shape = (max_running_requests + 1, SamplingParams.MAX_BIAS)
        self._upload = Uploader(device)
        self._sizes = np.zeros(max_running_requests + 1, np.int32)  # number of biased tokens
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._values = torch.zeros(shape, dtype=torch.float32, device=device)  # unused columns have the bias 0

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Store the biases of newly admitted requests."""
        for admission in admissions:
            row, bias = admission.req_pool_idx, admission.params.logit_bias
            packed = np.empty((2, len(bias)), np.int32)
            packed[0] = list(bias)
            packed.view(np.float32)[1] = list(bias.values())
            (new,) = self._upload([packed])
            self._sizes[row] = len(bias)
            self._ids[row, : len(bias)] = new[0]
            self._values[row].zero_()[: len(bias)] = new[1].view(torch.float32)

    def width(self, inputs: SamplingInputs) -> int:
        """Return the largest number of biased tokens of a row that uses the processor."""
        assert inputs.plan.req_pool_indices is not None
        return int(self._sizes[inputs.plan.req_pool_indices].max())

    def apply(self, logits: Tensor, inputs: SamplingInputs, rows: Tensor | None) -> Tensor:
        """Add the biases to the logits."""
        req_pool_indices, width = select_rows(inputs.req_pool_indices, rows), self.width(inputs)
        ids, values = (table[:, :width].index_select(0, req_pool_indices) for table in (self._ids, self._values))
        return logits.scatter_add_(1, ids, values)
