"""Conversion of a `Step` into the tensors that a forward pass reads, with one copy to the device per step.

The module owns the page table on the device and a host copy of it, which maps positions to KV locations
(page · page_size + offset). All work is done on whole numpy arrays: there is no Python loop over rows or tokens. The
result is what SGLang calls a `ForwardBatch`; in vLLM the model runner's `_prepare_inputs` builds it.

`Uploader` and `Download` are the copies between host and device. On a CPU no data is copied. On CUDA the host side is
pinned memory from torch's caching allocator, which reuses a block only after the copies that use the block have
finished. So the code here may drop its references to pinned memory before a copy has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttnBatch
from minisgl.core import I32, PENDING, EngineSpec, Step


class Line(IntEnum):
    """The lines of the arrays that describe the tokens of a step, int32 [lines, tokens]: one copy moves all of them."""

    INPUT_ID = 0  # or PENDING
    POSITION = 1
    OUT_CACHE_LOC = 2  # KV location to write
    REQ_POOL_IDX = 3
    SEQ_LEN = 4  # only where each token is a decode row: the number of tokens that attention reads


class ModelInputs(NamedTuple):
    """Inputs of the model's forward pass, on the device."""

    packed: Tensor  # [4 or more, tokens] int32; `Line` names its lines
    pending: bool  # whether a token id may be PENDING, which means: the token that the request sampled last


class SamplePlan(NamedTuple):
    """Parts of sampling that each row of logits uses, made on the host before the logits are computed."""

    flags: int  # bitwise or of the flags of all rows
    rows: dict[int, I32]  # flag of a group (`Sampler.groups`) -> the rows that use it; no entry if all rows do
    req_pool_indices: I32 | None = None  # [rows], if a `LogitsProcessor` is used


class Accepted(NamedTuple):
    """How many of its sampled tokens count in each row of a step that samples."""

    length: Tensor  # int64 [rows] number of tokens that count, at least 1
    last: Tensor  # int64 [rows] the last of these tokens


class SamplingInputs(NamedTuple):
    """Inputs of sampling: tensors with one entry for each sampled position of the step, on the device.

    In a step in which a row samples at several positions, ``req_pool_indices`` has that row's index several times.
    """

    logits_indices: Tensor | None  # index in the step of the token after which to sample; None: after every token
    req_pool_indices: Tensor
    positions: Tensor  # position of the token to be sampled
    plan: SamplePlan
    groups: dict[int, Tensor]  # `plan.rows` as tensors on the device
    verification: Any = None  # None: no row samples at several positions; or plugins/speculation: `DraftVerification`


class Uploader:
    """Uploader of host arrays: all arrays of a call go to the device in one copy."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, arrays: Sequence[I32]) -> list[Tensor]:
        """Return the arrays as int32 tensors on the device. The copy is ordered on the current stream.

        On a CPU the tensors share memory with the arrays, so the caller must not change the arrays afterwards.
        """
        if self.device.type == "cpu":
            return [torch.from_numpy(a) for a in arrays]
        host = torch.empty(sum(a.size for a in arrays), dtype=torch.int32, pin_memory=True)
        if arrays:
            np.concatenate([a.reshape(-1) for a in arrays], out=host.numpy())
        flat = host.to(self.device, non_blocking=True)
        parts = flat.split([a.size for a in arrays])
        return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


class Download:
    """An asynchronous copy of tensors to the host, on ``stream``, which must be the current stream.

    `arrays` waits for this copy, and not for work that is launched later.
    """

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None = None):
        self._event: Any = None
        if tensors and stream is not None:
            host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for h, t in zip(host, tensors, strict=True):
                h.copy_(t, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)
            self._tensors: Sequence[Tensor] = host
        else:
            self._tensors = tensors

    def ready(self) -> bool:
        """Return whether `arrays` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """Wait until the copy has finished and return the tensors as numpy arrays."""
        if self._event is not None:
            self._event.synchronize()
        return [t.numpy() for t in self._tensors]


class InputBuilder:
    """Builder of each step's inputs; owns the page table, int32 [max_running_requests + 1, max_pages]."""

    verifying_inputs: Callable[[InputBuilder, Step, SamplePlan], SamplingInputs] | None = None
    """`sampling_inputs` of steps with drafts. The plugin that verifies drafts sets it."""

    def __init__(self, spec: EngineSpec, device: torch.device):
        self.spec, self.device = spec, device
        self.upload = Uploader(device)
        columns = len(spec.groups) * spec.num_columns
        # The host copy gives KV locations without reading the device. On a CPU both tables share the same memory.
        self.page_table_cpu = np.full((spec.max_running_requests + 1, columns), spec.num_pages, np.int32)
        self.page_table = torch.from_numpy(self.page_table_cpu)
        if device.type != "cpu":
            self.page_table = self.page_table.to(device)
        self._cu_seqlens_q_cpu = np.arange(spec.max_running_requests + 2, dtype=np.int32)
        self._cu_seqlens_q = torch.from_numpy(self._cu_seqlens_q_cpu).to(device)

    def update_page_table(self, step: Step) -> None:
        """Apply the step's writes to the page table, on the host and on the device, in their order."""
        rows, columns, pages = step.page_table_updates
        if not len(rows):
            return
        self.page_table_cpu[rows, columns] = pages  # duplicate indices: numpy keeps the last write
        if self.device.type != "cpu":
            # With duplicate indices, a scatter on the device may keep any of the writes. Read the values back from the
            # host copy, so that all writes to one entry carry the same page.
            entries = rows * np.int32(self.page_table_cpu.shape[1]) + columns
            indices, values = self.upload([entries, self.page_table_cpu[rows, columns]])
            self.page_table.view(-1).index_copy_(0, indices.long(), values)

    def out_cache_loc(self, req_pool_indices: I32, positions: I32) -> I32:
        """Return the KV location (page · page_size + offset) of each position. All arrays are int32 [tokens]."""
        size = np.int32(self.spec.page_size)
        columns, offsets = np.divmod(positions, size)
        locations: I32 = self.page_table_cpu[req_pool_indices, columns] * size + offsets
        return locations

    def token_rows(self, step: Step) -> I32:
        """Pack a step into one host array, int32 [5, tokens], in which each token is a decode row: see `Line`."""
        req_pool_indices, positions = step.req_pool_indices, step.num_computed_tokens
        if step.num_decode < step.rows:
            counts = step.num_scheduled_tokens
            req_pool_indices = np.repeat(req_pool_indices, counts)
            first_tokens = np.cumsum(counts, dtype=np.int32) - counts
            positions = np.arange(len(step.input_ids), dtype=np.int32) + np.repeat(positions - first_tokens, counts)
        packed = np.empty((len(Line), len(step.input_ids)), np.int32)
        packed[Line.INPUT_ID] = step.input_ids
        packed[Line.POSITION] = positions
        packed[Line.OUT_CACHE_LOC] = self.out_cache_loc(req_pool_indices, positions)
        packed[Line.REQ_POOL_IDX] = req_pool_indices
        packed[Line.SEQ_LEN] = positions + 1
        return packed

    def build(self, step: Step) -> tuple[ModelInputs, AttnBatch]:
        """Build the inputs of a step that is not replayed as one graph: the model's inputs and attention's batch."""
        rows = step.rows
        if step.num_decode == rows:
            pending = bool((step.input_ids == PENDING).any())
            host = self.token_rows(step)
            (packed,) = self.upload([host])
            cu_seqlens_q_cpu, cu_seqlens_q = self._cu_seqlens_q_cpu[: rows + 1], self._cu_seqlens_q[: rows + 1]
            batch = AttnBatch(
                rows,
                cu_seqlens_q_cpu,
                host[Line.SEQ_LEN],
                cu_seqlens_q,
                packed[Line.SEQ_LEN],
                packed[Line.REQ_POOL_IDX],
                self.page_table,
            )
            return ModelInputs(packed, pending), batch
        cu_seqlens_q_cpu = np.zeros(rows + 1, np.int32)
        np.cumsum(step.num_scheduled_tokens, out=cu_seqlens_q_cpu[1:])
        pending = bool((step.input_ids[: cu_seqlens_q_cpu[step.num_continuing]] == PENDING).any())
        host = self.token_rows(step)[: Line.SEQ_LEN]
        seq_lens_cpu = step.num_computed_tokens + step.num_scheduled_tokens
        packed, req_pool_indices, seq_lens, cu_seqlens_q = self.upload(
            [host, step.req_pool_indices, seq_lens_cpu, cu_seqlens_q_cpu]
        )
        batch = AttnBatch(
            step.num_decode, cu_seqlens_q_cpu, seq_lens_cpu, cu_seqlens_q, seq_lens, req_pool_indices, self.page_table
        )
        return ModelInputs(packed, pending), batch

    def sampling_inputs(self, step: Step, plan: SamplePlan, batch: AttnBatch) -> SamplingInputs:
        """Build the inputs of sampling for a step in which at least one row samples.

        ``batch`` is the batch that attention was planned for. It may have padding rows after the rows of the step.
        """
        if step.num_verify:
            assert self.verifying_inputs is not None  # no step has drafts without the plugin
            return self.verifying_inputs(self, step, plan)
        rows, decode = step.rows, step.num_decode == step.rows
        if decode or (sample := step.sample).all():
            indices = None if decode else batch.cu_seqlens_q[1:] - 1
            groups = self.upload(list(plan.rows.values())) if plan.rows else []
            req_pool_indices, positions = batch.req_pool_indices[:rows], batch.seq_lens[:rows]
        else:
            last_tokens = batch.cu_seqlens_q_cpu[1:][sample] - np.int32(1)
            host = [last_tokens, step.req_pool_indices[sample], batch.seq_lens_cpu[:rows][sample]]
            indices, req_pool_indices, positions, *groups = self.upload([*host, *plan.rows.values()])
        return SamplingInputs(indices, req_pool_indices, positions, plan, dict(zip(plan.rows, groups, strict=True)))
