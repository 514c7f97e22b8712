"""Log-probabilities of sampled tokens, and of their most likely alternatives.

They are those of the model's own distribution, before masks, bias, penalties and temperature, as vLLM reports them by
default (but vLLM reports them after masks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl.config import Config
from minisgl.core import I32, Admission, Logprobs, SamplingParams, Step, StepResult
from minisgl.engine.inputs import Accepted, SamplingInputs
from minisgl.engine.logits_processors import LogitsProcessor
from minisgl.engine.sampler import select_rows
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.model_runner import ModelRunner, StepRunner


@hookimpl
def minisgl_wrap_runner(config: Config) -> Any:
    def wrap(runner: StepRunner, model_runner: ModelRunner) -> StepRunner:
        processor = SampledLogprobs(config.max_running_requests, model_runner.sampler.log_sum_exp)
        model_runner.sampler.add(processor)
        model_runner.readers["chosen"] = processor.read
        return runner

    return wrap


class SampledLogprobs(LogitsProcessor):
    """Changes no logits. It keeps those of the rows that ask for log-probabilities until their tokens are chosen.

    ``log_sum_exp`` turns logits [rows, vocab] into the logarithms [rows, 1] of the sums of their exponentials.
    """

    parameters = ("logprobs",)
    order = 0  # it sees the model's logits

    def __init__(self, max_running_requests: int, log_sum_exp: Callable[[Tensor], Tensor]):
        self._log_sum_exp = log_sum_exp
        self._alternatives = np.zeros(max_running_requests + 1, np.int32)  # to report with each token
        self._logits: Tensor | None = None  # of the step that samples
        self._unread: deque[I32] = deque()  # for each sampled step: the alternatives of each sampled position, or -1

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Store how many alternatives newly admitted requests ask for."""
        for admission in admissions:
            self._alternatives[admission.req_pool_idx] = admission.params.logprobs or 0

    def apply(self, logits: Tensor, inputs: SamplingInputs, rows: Tensor | None) -> Tensor:
        """Keep a copy of the logits."""
        self._logits = logits.clone()
        return logits

    def commit(
        self, tokens: Tensor, inputs: SamplingInputs, accepted: Accepted | None, rows: Tensor | None
    ) -> Mapping[str, Tensor]:
        """Return the log-probabilities of the ``tokens``, and the most likely tokens, best first, by name.

        ``chosen`` is float32 [rows], ``top`` float32 [rows, MAX_LOGPROBS], and ``top_ids`` int64 [rows, MAX_LOGPROBS].
        """
        plan, logits = inputs.plan, self._logits
        assert plan.req_pool_indices is not None and logits is not None
        self._logits = None
        alternatives: I32 = self._alternatives[plan.req_pool_indices]
        if (asking := plan.rows.get(self.flag)) is not None:
            alternatives[np.setdiff1d(np.arange(len(alternatives)), asking)] = -1
        self._unread.append(alternatives)
        top, top_ids = logits.topk(min(SamplingParams.MAX_LOGPROBS, logits.shape[1]), dim=1)
        total = self._log_sum_exp(logits)
        chosen = logits.gather(1, select_rows(tokens, rows)[:, None])
        return {"chosen": (chosen - total).squeeze(1), "top": top - total, "top_ids": top_ids}

    def read(self, step: Step, result: StepResult, arrays: Mapping[str, npt.NDArray[Any]]) -> StepResult:
        """Return the result of a step with its log-probabilities. ``arrays`` has those of `commit`, on the host."""
        alternatives, chosen = self._unread.popleft(), arrays["chosen"].tolist()
        entries: list[Logprobs | None] = [None] * len(alternatives)
        for i, position in enumerate(np.flatnonzero(alternatives >= 0)):
            ids, values = (arrays[name][i, : alternatives[position]].tolist() for name in ("top_ids", "top"))
            entries[position] = Logprobs(chosen[i], tuple(ids), tuple(values))
        rows: list[tuple[Logprobs, ...] | None] = []
        begins = np.cumsum(step.num_sampled_tokens) - step.num_sampled_tokens
        for begin, count in zip(begins.tolist(), result.accepted.tolist(), strict=True):
            row = tuple(entry for entry in entries[begin : begin + count] if entry is not None)
            rows.append(row or None)
        return result._replace(logprobs=tuple(rows))
