"""From a `Step` to the tensors that a forward pass reads: whole arrays at a time, one copy to the device.

Knows the page table, on the device and its twin on the host, with which it turns positions into places in the pool.
Nothing here depends on the length of a request, and no row is looked at in Python.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttnBatch, GraphKey
from minisgl.core import I32, PENDING, EngineSpec, Step
from minisgl.engine.sampler import SamplePlan
from minisgl.engine.transfer import Uploader

SHARING = 1 << 15
"""Tokens that need not be read again (the prefix that all rows share, times the rows but one) from which on it pays to
read them apart: on an H200 that costs about what reading so many tokens of eight KV heads does."""


class ModelInputs(NamedTuple):
    """What the model's forward pass takes, on the device."""

    packed: Tensor  # [4 or more, tokens] int32: ids (or PENDING), positions, places in the pool, slots
    pending: bool  # whether an id may be PENDING: what its slot sampled last


class SamplingInputs(NamedTuple):
    """What sampling takes: one entry for each row that samples, on the device."""

    last_token_indices: Tensor | None  # index of the row's last token; None: every token is one
    req_pool_indices: Tensor
    positions: Tensor  # of the token being chosen
    plan: SamplePlan
    groups: dict[int, Tensor]  # plan.rows on the device


class GraphInputBuffers:
    """The static input buffers of one graph bucket; `fill` is one copy.

    Rows beyond a step's are padding: they compute position 0 of the scratch slot, whose KV lies in the scratch page.
    """

    def __init__(self, key: GraphKey, spec: EngineSpec, table: Tensor, device: torch.device):
        rows = key.rows * key.q_len
        self.key, self._page_table, self._device = key, table, device
        self._pad = (0, 0, spec.num_pages * spec.page_size, spec.max_running_requests, 1)
        self._packed = torch.tensor(self._pad, dtype=torch.int32, device=device)[:, None].repeat(1, rows)
        self.tokens = ModelInputs(self._packed, pending=True)
        self._cu_seqlens_q_cpu = np.arange(rows + 1, dtype=np.int32)
        self._cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Take over a step's `InputBuilder.decode_rows` (None: only padding); returns what to plan."""
        size, n = self.key.rows, 0 if packed is None else packed.shape[1]
        host = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        array = host.numpy()
        array[:, n:] = np.array(self._pad, np.int32)[:, None]
        if packed is not None:
            array[:, :n] = packed
        self._packed.copy_(host, non_blocking=True)
        slots, seq_lens = self._packed[3], self._packed[4]
        return AttnBatch(
            size, self._cu_seqlens_q_cpu, array[4], self._cu_seqlens_q, seq_lens, slots, self._page_table, self.key
        )


class PiecewiseInputBuffers:
    """The static input buffers of a bucket of tokens, whatever rows they are of (a `GraphKey` with ``q_len`` 0).

    ``last`` int32 [max_slots]: the tokens whose hidden states are wanted, each row's last; behind those of a step stand
    an earlier one's, whose results nobody reads. None in a bucket of no more tokens than that: all are wanted.
    """

    def __init__(self, key: GraphKey, spec: EngineSpec, device: torch.device):
        pad = (0, 0, spec.num_pages * spec.page_size, spec.max_running_requests)  # as a `GraphInputBuffers`'s
        self._pad = torch.tensor(pad, dtype=torch.int32, device=device)[:, None]
        self.tokens = ModelInputs(self._pad.repeat(1, key.rows), pending=True)
        choose = key.rows > spec.max_running_requests
        self.last_token_indices = (
            torch.zeros(spec.max_running_requests, dtype=torch.int32, device=device) if choose else None
        )

    def fill(self, tokens: ModelInputs, last: Tensor | None) -> None:
        """Take over a step's tokens, which are on the device already, and those of them that are sampled from (None:
        nobody is)."""
        n = tokens.packed.shape[1]
        self.tokens.packed[:, :n] = tokens.packed[:4]
        self.tokens.packed[:, n:] = self._pad
        if self.last_token_indices is not None and last is not None:
            self.last_token_indices[: len(last)] = last


class InputBuilder:
    """Builds the inputs of each step; owns the page table [max_slots + 1, max_pages] int32. ``sharing``: attention
    looks at what all rows of a decode step have in common."""

    def __init__(self, spec: EngineSpec, device: torch.device, *, sharing: bool = True):
        self.spec, self.device, self.shared_prefix = spec, device, sharing
        self.upload = Uploader(device)
        columns = -(-spec.max_seq_len // spec.page_size)
        # The host's twin tells where a token's KV goes without a launch; on a CPU both are the same memory.
        self._page_table_cpu = np.full((spec.max_running_requests + 1, columns), spec.num_pages, np.int32)
        self.page_table = torch.from_numpy(self._page_table_cpu)
        if device.type != "cpu":
            self.page_table = self.page_table.to(device)
        self._cu_seqlens_q_cpu = np.arange(spec.max_running_requests + 2, dtype=np.int32)
        self._cu_seqlens_q = torch.from_numpy(self._cu_seqlens_q_cpu).to(device)
        self.shared_prefix_len = torch.zeros(1, dtype=torch.int32, device=device)  # what the last `share` found

    def graph_buffers(self, key: GraphKey) -> GraphInputBuffers:
        """Static buffers for a graph bucket."""
        return GraphInputBuffers(key, self.spec, self.page_table, self.device)

    def update_page_table(self, step: Step) -> None:
        """Apply the step's page-table writes, in their order."""
        slots, columns, pages = step.page_table_updates
        if not len(slots):
            return
        self._page_table_cpu[slots, columns] = pages  # of equal places, numpy keeps the last
        if self.device.type != "cpu":
            # A device's scatter keeps any, so equal places must carry equal pages: read them back.
            places = slots * np.int32(self._page_table_cpu.shape[1]) + columns
            at, values = self.upload([places, self._page_table_cpu[slots, columns]])
            self.page_table.view(-1).index_copy_(0, at.long(), values)

    def find_shared_prefix(self, step: Step) -> bool:
        """Whether it pays to read apart what all rows of a decode step have in common; `shared` then says how much.

        A page has one content, so where two rows have the same page in a column, all before it are alike.
        """
        size = self.spec.page_size
        low, high = 0, int(step.num_computed_tokens.min()) // size  # the token that is computed now is each row's own
        if not self.shared_prefix or high * size * (step.rows - 1) < SHARING:
            return False
        probe = -(-SHARING // (size * (step.rows - 1)))  # so many pages at least
        while low < high:
            column = self._page_table_cpu[step.req_pool_indices, probe - 1]
            if (column == column[0]).all():
                low = probe
            elif low == 0:
                return False
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        (length,) = self.upload([np.array([low * size], np.int32)])
        self.shared_prefix_len.copy_(length)
        return True

    def out_cache_loc(self, slots: I32, positions: I32) -> I32:
        """The place in the pool of each position, both int32 [tokens]."""
        size = np.int32(self.spec.page_size)
        columns, offsets = np.divmod(positions, size)
        places: I32 = self._page_table_cpu[slots, columns] * size + offsets
        return places

    def decode_rows(self, step: Step) -> I32:
        """For a step of decode rows only: ids, positions, places, slots and KV lengths, int32 [5, rows]."""
        packed = np.empty((5, step.rows), np.int32)
        packed[0] = step.input_ids
        packed[1] = step.num_computed_tokens
        packed[2] = self.out_cache_loc(step.req_pool_indices, step.num_computed_tokens)
        packed[3] = step.req_pool_indices
        packed[4] = step.num_computed_tokens + 1
        return packed

    def build(self, step: Step) -> tuple[ModelInputs, AttnBatch]:
        """The inputs of a step that runs operation by operation."""
        rows = step.rows
        pending = bool((step.input_ids[: step.num_decode] == PENDING).any())
        if step.num_decode == rows:
            host = self.decode_rows(step)
            (packed,) = self.upload([host])
            cu_seqlens_q_cpu, cu_seqlens_q = self._cu_seqlens_q_cpu[: rows + 1], self._cu_seqlens_q[: rows + 1]
            shared = self.shared_prefix_len if self.find_shared_prefix(step) else None
            batch = AttnBatch(
                rows,
                cu_seqlens_q_cpu,
                host[4],
                cu_seqlens_q,
                packed[4],
                packed[3],
                self.page_table,
                shared_prefix_len=shared,
            )
            return ModelInputs(packed, pending), batch
        cu_seqlens_q_cpu = np.zeros(rows + 1, np.int32)
        np.cumsum(step.num_scheduled_tokens, out=cu_seqlens_q_cpu[1:])
        host = np.empty((4, len(step.input_ids)), np.int32)
        host[0] = step.input_ids
        host[1] = np.arange(len(step.input_ids)) + np.repeat(
            step.num_computed_tokens - cu_seqlens_q_cpu[:-1], step.num_scheduled_tokens
        )
        host[3] = np.repeat(step.req_pool_indices, step.num_scheduled_tokens)
        host[2] = self.out_cache_loc(host[3], host[1])
        seq_lens_cpu = step.num_computed_tokens + step.num_scheduled_tokens
        packed, slots, seq_lens, cu_seqlens_q = self.upload(
            [host, step.req_pool_indices, seq_lens_cpu, cu_seqlens_q_cpu]
        )
        batch = AttnBatch(
            step.num_decode, cu_seqlens_q_cpu, seq_lens_cpu, cu_seqlens_q, seq_lens, slots, self.page_table
        )
        return ModelInputs(packed, pending), batch

    def sampling_inputs(self, step: Step, plan: SamplePlan, batch: AttnBatch) -> SamplingInputs:
        """What sampling takes, for a step in which some row samples; ``batch`` is what was planned for it."""
        rows = step.rows
        decode = step.num_decode == rows
        if step.sample.all():
            last = None if decode else batch.cu_seqlens_q[1:] - 1
            groups = self.upload(list(plan.rows.values())) if plan.rows else []
            slots, positions = batch.req_pool_indices[:rows], batch.seq_lens[:rows]
        else:
            ends = batch.cu_seqlens_q_cpu[1:][step.sample] - np.int32(1)
            who = [ends, step.req_pool_indices[step.sample], batch.seq_lens_cpu[:rows][step.sample]]
            last, slots, positions, *groups = self.upload([*who, *plan.rows.values()])
        return SamplingInputs(last, slots, positions, plan, dict(zip(plan.rows, groups, strict=True)))
