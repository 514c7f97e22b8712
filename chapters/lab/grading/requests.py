"""A request of the grader, as the student's process sees it: an object that keeps its identity from call to call.

Students' observers and proposers keep requests. So a request is sent as a number and its state, and the student's
process has one object for each number, whose state the grader's messages update.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from minisgl.core import Req, SamplingParams

__all__ = ["MirroredReq", "first_sent", "state_of", "update"]

STATE = (
    "arrival", "priority", "seed", "max_len", "queued_at_step", "req_pool_idx", "admission_order", "first_admission",
    "num_prompt_logprobs", "num_cached_tokens", "num_cached_pages", "finish_reason", "error",
)  # fmt: skip
"""The fields of a request that are sent with every change, besides its output. Those of the cache are not sent."""


class MirroredReq(Req):
    """A request in the student's process. ``copied`` counts the tokens that `tokens` returned."""

    __slots__ = ("copied", "number", "sent")

    def __init__(self, number: int, uid: int, prompt_ids: bytes, params: Any, state: list[Any]):
        super().__init__(
            uid, np.frombuffer(prompt_ids, np.int32), msgspec.convert(params, SamplingParams, strict=False), 0
        )
        self.number, self.copied = number, 0
        update(self, state)
        self.sent = state_of(self)

    def tokens(self) -> Any:
        """Return the tokens, and count them."""
        self.copied += len(self)
        return super().tokens()


def first_sent(req: Req) -> list[Any]:
    """Return what never changes of a request: its uid, prompt and parameters."""
    return [req.uid, req.prompt_ids.tobytes(), msgspec.to_builtins(req.params, str_keys=True)]


def state_of(req: Req) -> list[Any]:
    """Return the state of a request as plain data."""
    return [*(getattr(req, name) for name in STATE), np.asarray(req.output_ids, np.int64).tobytes()]


def update(req: Req, state: list[Any]) -> None:
    """Set the state of a request. The list of its output stays the same object."""
    *values, output = state
    for name, value in zip(STATE, values, strict=True):
        setattr(req, name, value)
    tokens = np.frombuffer(output, np.int64).tolist()
    if req.output_ids != tokens:
        req.output_ids[:] = tokens
