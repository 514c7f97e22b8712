"""Steps of several rounds of verification: a runner that wraps another one (option ``verification_rounds``).

In each round, rows verify drafts and go on after the last token that counts. Between two rounds of a step, this runner
drafts again from the tokens that it keeps of each request. Without it, every step has one round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from minisgl.core import I32, PENDING, Admission, Step, StepResult, TokenMasks
from minisgl.engine.inputs import Accepted, Line, SamplingInputs
from minisgl.engine.model_runner import Forward, ModelRunner, StepRunner
from minisgl.engine.sampler import PROCESSORS
from minisgl.plugins.kernels.ops.rounds import advance, next_drafts
from minisgl.plugins.speculation.verification import DraftVerification

__all__ = ["Repeatable", "RoundsRunner", "new_history"]


def new_history(max_running_requests: int, max_seq_len: int, device: torch.device) -> Tensor:
    """Allocate the ``history`` of a `RoundsRunner`, with a row for each request-pool row and the scratch row."""
    return torch.zeros((max_running_requests + 1, max_seq_len + 1), dtype=torch.int32, device=device)


class Repeatable(Protocol):
    """A forward pass that can be launched again on inputs that the device has changed."""

    @property
    def packed(self) -> Tensor:
        """The inputs: int32 [5, rows], as `InputBuilder.token_rows` packs them."""

    def run(self) -> Tensor:
        """Launch the forward pass again. Return the logits [rows, vocab], in the same tensor each time."""


class RoundsRunner:
    """Wraps a runner of steps of one round. ``model_runner`` is the `ModelRunner` that it wraps or is.

    ``history`` int32 [request-pool rows, positions] has the tokens of each request, from which later rounds draft.
    """

    def __init__(self, history: Tensor, runner: StepRunner, model_runner: ModelRunner):
        self.runner, self.model_runner = runner, model_runner
        self.start, self.forward, self.close = runner.start, runner.forward, runner.close
        self._history = history

    def begin(self, step: Step) -> None:
        """Apply the admissions and page-table updates of a step, and keep the tokens of newly admitted requests."""
        self.runner.begin(step)
        self._keep_tokens(step.admissions)

    def _keep_tokens(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            parts = [ids for ids in (admission.prompt_ids, admission.output_ids) if ids is not None]
            if parts:
                (ids,) = self.model_runner.inputs.upload([np.concatenate(parts)])
                self._history[admission.req_pool_idx, : len(ids)] = ids

    def sample(self, forward: Forward, masks: TokenMasks | None) -> dict[str, Tensor]:
        """Choose the tokens of a step, and compute its further rounds.

        If there are any, ``tokens`` int64 [rounds, rows · w] has the sampled tokens of all rounds, and ``accepted``
        [rounds, rows] says how many of each w count.
        """
        step, inputs = forward.step, forward.sampling
        if inputs is None:
            return self.runner.sample(forward, masks)
        if step.rounds > 1 and forward.repeat is not None:
            return {**forward.scores, **self._repeat_on_device(forward, inputs, forward.repeat)}
        tensors = self.runner.sample(forward, masks)
        self._history[inputs.req_pool_indices.long(), inputs.positions.long()] = tensors["tokens"].int()
        if step.rounds > 1 and "accepted" in tensors:
            tensors |= self._repeat(step, tensors["tokens"], tensors["accepted"])
        return tensors

    def _repeat_on_device(self, forward: Forward, inputs: SamplingInputs, repeat: Repeatable) -> dict[str, Tensor]:
        """Compute all rounds of a step with one forward pass, whose inputs the device changes between them."""
        logits, verification = forward.logits, inputs.verification
        assert logits is not None and isinstance(verification, DraftVerification)
        step, runner, packed = forward.step, self.model_runner, repeat.packed
        width = int(step.num_scheduled_tokens[0])
        verification = verification._replace(drafts=verification.drafts.clone())
        inputs = inputs._replace(verification=verification)
        table, size = runner.inputs.page_table, runner.spec.page_size
        all_tokens: list[Tensor] = []
        lengths: list[Tensor] = []
        for number in range(step.rounds):
            if number:
                verification.drafts[:, :-1] = packed[Line.INPUT_ID, : len(logits)].view(-1, width)[:, 1:]
                inputs = inputs._replace(positions=packed[Line.SEQ_LEN, : len(logits)].clone())
                logits = repeat.run()[: len(logits)]
            tokens = runner.draw(logits, inputs)
            length = advance(tokens.view(-1, width), packed, self._history, table, size)
            if runner.rank == 0 and inputs.plan.flags & PROCESSORS:
                last = packed[Line.INPUT_ID, : len(logits) : width].long()
                runner.sampler.commit(tokens, inputs, Accepted(length.long(), last))
            all_tokens.append(tokens)
            lengths.append(length)
        runner.last_token_ids.index_put_(
            (verification.req_pool_indices,), packed[Line.INPUT_ID, : len(logits) : width].long()
        )
        return {"tokens": torch.stack(all_tokens), "accepted": torch.stack(lengths)}

    def _repeat(self, step: Step, tokens: Tensor, accepted: Tensor) -> dict[str, Tensor]:
        """Compute the rounds of a step after the first, whose sampled ``tokens`` and lengths ``accepted`` are given."""
        starts, width = step.num_computed_tokens, int(step.num_scheduled_tokens[0])
        rows, nothing = torch.from_numpy(step.req_pool_indices), np.empty(0, np.int32)
        all_tokens, lengths = [tokens], [accepted]
        for _ in range(1, step.rounds):
            starts = starts + lengths[-1].cpu().numpy().astype(np.int32)
            drafts = next_drafts(self._history, rows, torch.from_numpy(starts + 1), width - 1)
            ids = np.concatenate((np.full((step.rows, 1), PENDING, np.int32), drafts.cpu().numpy()), axis=1)
            again = replace(
                step,
                num_computed_tokens=starts,
                input_ids=ids.reshape(-1),
                page_table_updates=(nothing, nothing, nothing),
                admissions=(),
                rounds=1,
            )
            tensors = self.sample(self.forward(again), None)
            all_tokens.append(tensors["tokens"])
            lengths.append(tensors["accepted"])
        return {"tokens": torch.stack(all_tokens), "accepted": torch.stack(lengths)}

    def read(self, step: Step, arrays: Mapping[str, npt.NDArray[Any]]) -> StepResult:
        """Return the result of a step. ``arrays`` are the tensors that `sample` returned, on the host."""
        if step.rounds == 1:
            return self.runner.read(step, arrays)
        return _read_rounds(step, arrays["tokens"], arrays["accepted"].astype(np.int32))


def _read_rounds(step: Step, tokens: npt.NDArray[Any], accepted: I32) -> StepResult:
    """Return the result of a step of several rounds.

    ``tokens`` [rounds, rows · w] has all sampled tokens, ``accepted`` int32 [rounds, rows] how many of each w count.
    """
    width = int(step.num_sampled_tokens[0])
    runs = tokens.astype(np.int32).reshape(step.rounds, step.rows, width)
    out = np.zeros((step.rows, step.rounds * width), np.int32)
    for row in range(step.rows):
        run = np.concatenate([runs[k, row, : accepted[k, row]] for k in range(step.rounds)])
        out[row, : len(run)] = run
    return StepResult(step.id, out, accepted.sum(0, dtype=np.int32), rounds=accepted)
