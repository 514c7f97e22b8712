"""An engine that samples recorded outputs, so that the stages can be counted without a model.

The counts of the stages 1 to 7 do not depend on the sampled tokens. Those of stages 8 and 9 do: which drafts are
accepted follows from the text. ``outputs.json`` has the output tokens of `tutor` for each request of the workload,
greedy, in float32 on a CPU. ``python -m minisgl.chapters.ladder.record`` writes it again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minisgl.bench.workload import SampleRequest
from minisgl.chapters.ladder.workload import Arrival
from minisgl.core import EngineSpec, Step, StepResult
from minisgl.models.shipped import weights_dir
from minisgl.testing.null import NullEngine
from minisgl.tokenizer.tokenizer import Tokenizer

__all__ = ["RecordedEngine", "ended", "outputs", "text"]

FILE = Path(__file__).with_name("outputs.json")


def outputs() -> list[list[int]]:
    """Return the recorded output tokens of each request."""
    found: list[list[int]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def ended(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the requests of `workload` with answers that are over where the model ended them, if it did.

    In the workload answers have exact lengths: the model goes on after the end of its answer, and repeats itself.
    """
    config = json.loads((weights_dir("tutor") / "config.json").read_text(encoding="utf-8"))
    ends, found = config["eos_token_id"], []
    for arrival, tokens in zip(arrivals, outputs(), strict=True):
        length = next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens))
        found.append(arrival._replace(request=SampleRequest(arrival.request.prompt_ids, length)))
    return found


def text(tokens: Sequence[int]) -> str:
    """Return the text of output tokens of `tutor`."""
    tokenizer = Tokenizer.from_dir(weights_dir("tutor"))
    assert tokenizer is not None
    return tokenizer.decode(list(tokens))


class RecordedEngine(NullEngine):
    """A `NullEngine` that samples ``outputs[uid]`` for the request ``uid`` and accepts the drafts that equal them.

    A step that computes past the end of a request samples the token 1 there.
    """

    def __init__(self, spec: EngineSpec, arrivals: Sequence[Arrival], outputs: Sequence[Sequence[int]]):
        super().__init__(spec)
        self.prompts, self.outputs = [len(arrival.request.prompt_ids) for arrival in arrivals], outputs
        self._uids: dict[int, int] = {}  # request-pool row → uid

    def launch(self, step: Step) -> None:
        """Queue the step, and note which requests got a row."""
        super().launch(step)
        self._uids |= {admission.req_pool_idx: admission.uid for admission in step.admissions}

    def result(self) -> StepResult:
        """Return the result of the oldest unread step; tokens [rows, the most that a row samples]."""
        step = self._unread.popleft()
        tokens = np.ones((step.rows, max(int(step.num_sampled_tokens.max()), 1)), np.int32)
        accepted = step.num_sampled_tokens.astype(np.int32)
        ends = np.cumsum(step.num_scheduled_tokens)
        for i, count in enumerate(step.num_sampled_tokens.tolist()):
            uid = self._uids[int(step.req_pool_indices[i])]
            last = int(step.num_computed_tokens[i] + step.num_scheduled_tokens[i])  # the position after the row's
            first = last - count + 1 - self.prompts[uid]
            sampled = self.outputs[uid][first : first + count]
            tokens[i, : len(sampled)] = sampled
            if i in step.verification_rows:
                drafts = step.input_ids[ends[i] - count + 1 : ends[i]]
                wrong = np.flatnonzero(drafts != tokens[i, : count - 1])
                accepted[i] = 1 + (int(wrong[0]) if len(wrong) else count - 1)
        return StepResult(step.id, tokens, accepted)
