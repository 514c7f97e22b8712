"""`speculation=draft_model`: a smaller model with the same tokenizer drafts, on an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minisgl import hookimpl
from minisgl.config import ConfigError
from minisgl.core import I32, Admission, EngineSpec, Req, SamplingParams, Step
from minisgl.engine.build import build_engine
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.speculation import DraftProposer

PAGE_SIZE = 16
MAX_CHUNK = 1024
"""The largest number of tokens of one request that the draft model computes in a step."""


@dataclass
class DraftModel:
    """Drafts of a smaller model with the same tokenizer."""

    model: str = "tutor-draft"
    """The smaller model: a name, a directory or a Hugging Face id, as in the option ``model``."""
    load_format: str = "auto"
    """``auto``, or ``dummy`` for random weights."""
    device: str = "auto"
    """The device of the smaller model: ``auto``, ``cpu`` or ``cuda``."""
    max_drafts: int = 4
    """Largest number of draft tokens of a request in one step."""
    max_requests: int = 64
    """Number of requests that can have drafts at a time. The smaller model has KV memory for these requests."""

    def build(self, spec: EngineSpec) -> DraftModelProposer:
        return DraftModelProposer(self, spec)


class Row:
    """A row of the draft model's request pool, and the tokens whose KV it has, wrong drafts included."""

    def __init__(self, req_pool_idx: int):
        self.req_pool_idx = req_pool_idx
        self.computed: I32 = np.empty(0, np.int32)


class Draft(NamedTuple):
    """The drafts of one request, while `propose` computes them."""

    index: int  # of the request in the arguments of `propose`
    row: Row
    known: I32  # the request's tokens
    want: int  # tokens to draft after them
    tokens: list[int]  # the tokens drafted so far


class DraftModelProposer(DraftProposer):
    """Runs the draft model for all requests together.

    The first step computes the tokens without KV, and drafts one token. Each further step drafts one more token.
    A request gets a row with its first drafts, and keeps the row until the request is removed. A row has pages for the
    longest request, so the page table never changes. The row's KV is right up to the first wrong draft. The next step
    writes over the KV from this draft on.
    """

    costly = True

    def __init__(self, options: DraftModel, spec: EngineSpec):
        self.max_drafts = options.max_drafts
        max_requests = min(options.max_requests, spec.max_running_requests)
        self.max_len = min(spec.max_seq_len, ModelConfig.from_dir(resolve_model(options.model)).max_len)
        columns = -(-self.max_len // PAGE_SIZE)
        words = [f"{name}={getattr(options, name)}" for name in ("model", "load_format", "device")]
        words += [f"max_running_requests={max_requests}", f"max_seq_len={self.max_len}", "speculation=none"]
        words += [f"page_size={PAGE_SIZE}", f"num_pages={max_requests * columns}"]
        manager = PluginManager.load()
        self.engine = build_engine(compose(manager, words), manager)
        if self.engine.spec.vocab_size != spec.vocab_size:
            raise ConfigError(
                f"speculation.model={options.model} has {self.engine.spec.vocab_size} tokens and the served model has "
                f"{spec.vocab_size}. The models must have the same tokenizer."
            )
        pages = np.arange(max_requests * columns, dtype=np.int32)
        self.page_table_updates = pages // columns, pages % columns, pages  # of the first step: row, column, page
        self.admissions: list[Admission] = []  # of the next step
        self.next_id = 0
        self.rows: dict[int, Row] = {}  # uid → row
        self.free_rows = list(range(max_requests))

    def removed(self, req: Req) -> None:
        if req.uid in self.rows:
            self.free_rows.append(self.rows.pop(req.uid).req_pool_idx)

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = []
        for i, (req, position, limit) in enumerate(zip(reqs, positions, limits, strict=True)):
            # If the token before `position` is unread, it must be drafted too.
            want = position - len(req) + limit
            if limit and len(req) + want <= self.max_len and self._has_row(req):
                drafts.append(Draft(i, self.rows[req.uid], req.tokens(), want, []))
        self._first_tokens(drafts)
        for k in range(1, max((draft.want for draft in drafts), default=0)):
            some = [draft for draft in drafts if draft.want > k]
            self._compute(some, [len(draft.known) + k - 1 for draft in some], [draft.tokens[-1:] for draft in some])
        proposed: list[Sequence[int]] = [()] * len(reqs)
        for draft in drafts:
            draft.row.computed = np.array([*draft.known, *draft.tokens[:-1]], np.int32)
            proposed[draft.index] = draft.tokens[draft.want - limits[draft.index] :]
        return proposed

    def close(self) -> None:
        self.engine.close()

    def _has_row(self, req: Req) -> bool:
        """Return whether the request has a row. Give it a free row if it has none and a row is free."""
        if req.uid not in self.rows and self.free_rows:
            self.rows[req.uid] = row = Row(self.free_rows.pop())
            # The noise of sampling depends on seed, position and token only. So the draft model draws the same token
            # as the served model wherever their distributions are alike.
            of, names = req.params, ("temperature", "top_k", "top_p", "min_p")
            params = SamplingParams(**{name: getattr(of, name) for name in names})
            self.admissions.append(Admission(row.req_pool_idx, req.uid, params, req.seed))
        return req.uid in self.rows

    def _first_tokens(self, drafts: list[Draft]) -> None:
        """Compute the tokens that have no KV yet, and draft the token after them."""
        starts, runs = [], []
        for draft in drafts:
            computed = draft.row.computed[: len(draft.known) - 1]
            same = computed == draft.known[: len(computed)]
            start = len(computed) if same.all() else int(same.argmin())
            while len(draft.known) - start > MAX_CHUNK:
                self._compute([draft], [start], [draft.known[start : start + MAX_CHUNK]])
                draft.tokens.clear()
                start += MAX_CHUNK
            starts.append(start)
            runs.append(draft.known[start:])
        self._compute(drafts, starts, runs)

    def _compute(self, drafts: list[Draft], starts: list[int], runs: Sequence[Sequence[int] | I32]) -> None:
        """Compute the tokens ``runs[i]`` from position ``starts[i]`` on, and add the token sampled after them."""
        if not drafts:
            return
        order = sorted(range(len(drafts)), key=lambda i: len(runs[i]) > 1)  # decode rows come first
        counts = np.array([len(runs[i]) for i in order], np.int32)
        step = Step(
            id=self.next_id,
            req_pool_indices=np.array([drafts[i].row.req_pool_idx for i in order], np.int32),
            num_computed_tokens=np.array([starts[i] for i in order], np.int32),
            num_scheduled_tokens=counts,
            num_sampled_tokens=np.ones(len(order), np.int32),
            num_decode=int((counts == 1).sum()),
            num_verify=0,
            input_ids=np.concatenate([np.asarray(runs[i], np.int32) for i in order]),
            page_table_updates=self.page_table_updates,
            admissions=tuple(self.admissions),
        )
        self.engine.launch(step)
        for i, token in zip(order, self.engine.result().tokens[:, 0].tolist(), strict=True):
            drafts[i].tokens.append(token)
        none = np.empty(0, np.int32)
        self.page_table_updates, self.admissions, self.next_id = (none, none, none), [], self.next_id + 1


@hookimpl
def minisgl_configs() -> Any:
    yield "speculation", "draft_model", DraftModel
