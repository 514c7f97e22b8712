"""Top-k and top-p: of a request's tokens, only the most likely ones.

A request keeps its ``top_k`` most likely tokens, and of these the fewest that together have the probability ``top_p``.
To find them, logits are sorted. Most requests with top-k need only a few of the largest ones, so there are two
processors: one sorts `PARTIAL_SORT_WIDTH` logits of a row, the other all of them.
"""

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
from minisgl.engine.sampler import Sampler, select_rows
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner, StepRunner

__all__ = ["PARTIAL_SORT_WIDTH", "TopKP", "add_top_k_p", "top_k_p_threshold"]

PARTIAL_SORT_WIDTH = 256
"""For a row with top_k from 1 to this number, only this number of the row's largest logits is sorted. The width is a
constant, so the floating-point sums of a row do not depend on the parameters of other rows."""


@hookimpl
def minisgl_wrap_runner(config: Config) -> Any:
    def wrap(runner: StepRunner, model_runner: ModelRunner) -> StepRunner:
        add_top_k_p(model_runner.sampler, config.max_running_requests)
        return runner

    return wrap


def add_top_k_p(sampler: Sampler, max_running_requests: int) -> None:
    """Add both processors to ``sampler``."""
    for partial in (True, False):
        sampler.add(TopKP(max_running_requests, sampler, partial=partial))


class TopKP(LogitsProcessor):
    """Masks all but the most likely tokens of the rows whose logits it sorts, in part or in full.

    It keeps ``top_k`` and ``top_p`` of each request-pool row.
    """

    parameters = ("top_k", "top_p")
    order = 60
    after_temperature = True

    def __init__(self, max_running_requests: int, sampler: Sampler, *, partial: bool):
        self.vocab_size, self.partial, self._sums = sampler.vocab_size, partial, sampler.sums
        self._upload = Uploader(sampler.device)
        # int32 [request-pool rows, 2]: top_k, 0 if it is off, and the bits of top_p, a float32
        self._params = torch.zeros((max_running_requests + 1, 2), dtype=torch.int32, device=sampler.device)

    def serves(self, params: SamplingParams) -> bool:
        """Return whether a request needs this one of the two processors."""
        top_k = self._top_k(params)
        if 0 < top_k <= PARTIAL_SORT_WIDTH:
            return self.partial
        return not self.partial and (top_k > 0 or params.top_p < 1.0)

    def _top_k(self, params: SamplingParams) -> int:
        return params.top_k if 0 < params.top_k < self.vocab_size else 0

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Store the parameters of newly admitted requests."""
        values = np.empty((len(admissions), 2), np.int32)
        values[:, 0] = [self._top_k(admission.params) for admission in admissions]
        values.view(np.float32)[:, 1] = [admission.params.top_p for admission in admissions]
        rows, params = self._upload([np.array([a.req_pool_idx for a in admissions], np.int32), values])
        self._params.index_copy_(0, rows.long(), params)

    def apply(self, logits: Tensor, inputs: SamplingInputs, rows: Tensor | None) -> Tensor:
        """Set the logits of tokens that are not among the most likely ones to -inf."""
        params = self._params.index_select(0, select_rows(inputs.req_pool_indices, rows))
        width = min(PARTIAL_SORT_WIDTH, self.vocab_size) if self.partial else self.vocab_size
        top_k, top_p = params[:, 0], params[:, 1].view(torch.float32)
        threshold = top_k_p_threshold(logits, top_k, top_p, width, self._sums)
        return logits.masked_fill_(logits < threshold, -torch.inf)


def top_k_p_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, width: int, sums: Any = torch) -> Tensor:
    """Return the smallest logit [rows, 1] that top-k followed by top-p keeps. Equal logits are kept too.

    ``top_k`` is int32 (0: off), ``top_p`` is in (0, 1] (Holtzman et al., "The curious case of neural text
    degeneration", 2019). Only the ``width`` largest logits of a row are sorted: ``width`` must be the vocabulary
    size, or at least every row's top_k with no top_k off. ``sums`` has torch's functions ``softmax`` and ``cumsum``.
    """
    if width < logits.shape[1]:
        values = logits.topk(width, dim=1).values
    else:
        values = logits.sort(dim=1, descending=True).values
    limit = torch.where(top_k > 0, top_k.clamp(max=width), width)
    beyond = torch.arange(width, device=logits.device) >= limit[:, None]
    probs = sums.softmax(values.masked_fill(beyond, -torch.inf), dim=1)
    before = sums.cumsum(probs, dim=1) - probs  # total probability of the more likely tokens
    kept = ((before < top_p[:, None]) | (top_p[:, None] >= 1.0)) & ~beyond
    kept[:, 0] = True
    return values.gather(1, kept.sum(dim=1, keepdim=True) - 1)
