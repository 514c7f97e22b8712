"""Steps written by hand, for tests of an engine without a scheduler.

Each request-pool row owns the same pages in all steps: row r owns page r · n + i as its page number i, where n is the
number of pages divided by the number of rows. The module knows no engine and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import PENDING, Admission, EngineSpec, PromptRange, SamplingParams, Step

__all__ = ["RowSpec", "StepWriter"]


@dataclass
class RowSpec:
    """One row of a step: it computes ``tokens`` at the positions from ``start`` on.

    A row with one token that samples is a decode row, unless ``chunk`` is True. A row that samples several times
    verifies. All other rows are prefill chunks.
    """

    req_pool_idx: int
    start: int
    tokens: Sequence[int]
    num_sampled: int = 1
    chunk: bool = False
    admission: Admission | None = None
    targets: Sequence[int] = ()  # of a `PromptRange`, whose first position is ``first_position``
    first_position: int = 0
    num_top: int = 0
    shared: dict[int, int] = field(default_factory=dict)  # page number → the page to use instead of the row's own

    @property
    def order(self) -> int:
        """Return the place of the row's kind in a step: 0 decode, 1 verification, 2 chunk."""
        if self.chunk:
            return 2
        return 0 if len(self.tokens) == 1 else 1

    @staticmethod
    def prompt(
        req_pool_idx: int, tokens: Sequence[int], params: SamplingParams, seed: int = 0, with_tokens: bool = False
    ) -> RowSpec:
        """Return the row that admits a request and computes its whole prompt.

        The admission has the tokens if a penalty counts them, or ``with_tokens``.
        """
        history = (np.asarray(tokens, np.int32), np.empty(0, np.int32)) if with_tokens or params.needs_history else ()
        admission = Admission(req_pool_idx, req_pool_idx, params, seed, *history)
        return RowSpec(req_pool_idx, 0, tokens, chunk=True, admission=admission)

    @staticmethod
    def decode(req_pool_idx: int, position: int, token: int = PENDING) -> RowSpec:
        """Return a decode row, by default on the token that the request sampled last."""
        return RowSpec(req_pool_idx, position, [token])

    @staticmethod
    def verify(req_pool_idx: int, position: int, drafts: Sequence[int], token: int = PENDING) -> RowSpec:
        """Return a row that verifies ``drafts`` (at least one) after ``token``, which is at ``position``."""
        return RowSpec(req_pool_idx, position, [token, *drafts], 1 + len(drafts))


class StepWriter:
    """Writes the steps of one engine, with consecutive ids."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.next_step_id = 0

    def pages(self, row: RowSpec, rounds: int = 1) -> list[tuple[int, int, int]]:
        """Return the page-table updates of the pages of all positions up to the last one of the row's ``rounds``."""
        per_row, end = self.spec.num_pages // self.spec.max_running_requests, row.start + rounds * len(row.tokens)
        columns = range(-(-end // self.spec.page_size))
        own = row.req_pool_idx * per_row
        assert len(columns) <= per_row, f"row {row.req_pool_idx} needs {len(columns)} pages, but owns {per_row}"
        return [(row.req_pool_idx, column, row.shared.get(column, own + column)) for column in columns]

    def step(self, *rows: RowSpec, late_sampling: bool = False, rounds: int = 1) -> Step:
        """Return the next step, with these rows in the order that `Step` requires."""
        ordered = sorted(rows, key=lambda row: row.order)
        updates = np.array([update for row in ordered for update in self.pages(row, rounds)], np.int32).T
        prompts = [
            PromptRange(i, row.first_position, np.asarray(row.targets, np.int32), row.num_top)
            for i, row in enumerate(ordered)
            if len(row.targets)
        ]
        step = Step(
            id=self.next_step_id,
            req_pool_indices=np.array([row.req_pool_idx for row in ordered], np.int32),
            num_computed_tokens=np.array([row.start for row in ordered], np.int32),
            num_scheduled_tokens=np.array([len(row.tokens) for row in ordered], np.int32),
            num_sampled_tokens=np.array([row.num_sampled for row in ordered], np.int32),
            num_decode=sum(row.order == 0 for row in ordered),
            num_verify=sum(row.order == 1 for row in ordered),
            input_ids=np.concatenate([np.asarray(row.tokens, np.int32) for row in ordered]),
            page_table_updates=(updates[0].copy(), updates[1].copy(), updates[2].copy()),
            admissions=tuple(row.admission for row in ordered if row.admission is not None),
            prompt_logprobs=tuple(prompts),
            late_sampling=late_sampling,
            rounds=rounds,
        )
        self.next_step_id += 1
        return step
