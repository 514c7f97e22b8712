"""What the simulated engine records of requests, launched steps and rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from minisgl.core import I32, I64, Step, TokenMasks
from minisgl.testing.truth import ExpectedTokens

NONE, SEVERAL = -1, -2  # used in place of an admission number: no admission, more than one admission


@dataclass
class Admitted:
    """The request of a request-pool row. ``number`` counts admissions; each admission of a request has another."""

    number: int
    uid: int
    end: int = -1  # position after its last row; -1: the request had no row since its admission
    last_token: int = -1  # sampled last
    last_position: int = -1  # position of last_token
    ended_by: int = -1  # the step whose result ended the request; -1: the request has not ended
    verified_by: int = -1  # the last step with a verification row of the request


@dataclass
class Launched:
    step: Step
    digest: bytes
    read: int  # number of results that were read before the launch
    masks: TokenMasks | None = None
    masks_digest: bytes = b""
    sampled: int = -1  # number of results that were read before `SimEngine.sample`; -1: not called


@dataclass
class Footprint:
    """The request-pool rows and pages that an executed step accessed.

    Kept as long as a step that was launched before this step's result was read has not been executed.
    """

    pool_rows: I64  # [max_running_requests] number of the admission that had a row of the step, or NONE
    pages: I64  # [num_pages] number of the admission that accessed the page, NONE or SEVERAL


class RowPages(NamedTuple):
    """The pages that a row may read or write in one KV group: those in the columns of the group from ``first`` on."""

    group: int
    first: int
    pages: I32


@dataclass
class Row:
    index: int
    req_pool_idx: int
    admitted: Admitted
    stream: ExpectedTokens
    start: int
    end: int
    tokens: I32
    num_sampled: int
    verifies: bool
    first_sampled: int  # number of the row's first sampled position among those of the step
    pages: list[RowPages]  # of each group, up to the last position that the row may compute, in all rounds
    accepted: int = 0  # set when the row is computed

    def at(self, step: int, **more: int) -> dict[str, Any]:
        return {
            "step": step,
            "row": self.index,
            "uid": self.admitted.uid,
            "req_pool_idx": self.req_pool_idx,
            **more,
        }


def digest_of(masks: TokenMasks) -> bytes:
    """Return the bytes of all arrays of the masks, to see later whether they were changed."""
    return masks.positions.tobytes() + masks.bits.tobytes()
