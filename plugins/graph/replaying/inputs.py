"""Static inputs of a bucket: the tensors that a recording reads, and how a step is written into them.

They keep their addresses, because a recording reads from fixed addresses. What a step does not fill is padding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttnBatch, GraphKey
from minisgl.core import I32, EngineSpec, Step
from minisgl.engine.inputs import Line, ModelInputs

__all__ = ["GraphInputBuffers", "PiecewiseInputBuffers", "repeats_few_reads"]

MAX_REPEATED_TOKENS = 1 << 15
"""The largest number of tokens of KV that a step may read more than once in order to be replayed as one launch.

As decode rows, the k tokens of a verification row read the KV of their request k times. In return, the host launches
one graph instead of two launches a layer. While a step verifies, the device has no other work, so the launches count:
on an H200, 64 rows of Qwen3-14B with two drafts each and 29,000 repeated tokens take 16.4 ms, and 17.5 in pieces.
"""

MIN_CAPACITY = 64
"""The smallest `PiecewiseInputBuffers.capacity`."""


class GraphInputBuffers:
    """Static input buffers of one bucket of decode rows. `fill` writes them with one host-to-device copy.

    Rows that the step does not use are padding: each computes position 0 of the scratch request-pool row and writes its
    KV to the scratch page. ``page_table`` is the live page table on the device.
    """

    def __init__(self, key: GraphKey, spec: EngineSpec, page_table: Tensor, device: torch.device):
        rows = key.rows * key.q_len
        self.key, self._page_table, self._device = key, page_table, device
        pad = (0, 0, spec.num_pages * spec.page_size, spec.max_running_requests, 1)  # in the order of `Line`
        self._pad = np.array(pad, np.int32)[:, None]
        self._packed = torch.tensor(pad, dtype=torch.int32, device=device)[:, None].repeat(1, rows)
        self.tokens = ModelInputs(self._packed, pending=True)
        self._req_pool_indices, self._seq_lens = self._packed[Line.REQ_POOL_IDX], self._packed[Line.SEQ_LEN]
        self._cu_seqlens_q_cpu = np.arange(rows + 1, dtype=np.int32)
        self._cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Copy the rows of a step into the buffers and pad up to the bucket. Return the batch for attention to plan.

        ``packed`` comes from `InputBuilder.token_rows`. If it is None, all rows of the bucket become padding.
        """
        size, n = self.key.rows, 0 if packed is None else packed.shape[1]
        host = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        array = host.numpy()
        array[:, n:] = self._pad
        if packed is not None:
            array[:, :n] = packed
        self._packed.copy_(host, non_blocking=True)
        return AttnBatch(
            size,
            self._cu_seqlens_q_cpu,
            array[Line.SEQ_LEN],
            self._cu_seqlens_q,
            self._seq_lens,
            self._req_pool_indices,
            self._page_table,
            self.key,
        )


class PiecewiseInputBuffers:
    """Static input buffers of a bucket of tokens, for steps that are not all decode (a `GraphKey` with ``q_len`` 0).

    ``logits_indices`` int32 [capacity] lists the tokens whose hidden states the recording returns: those after which
    the step samples, and those that score a prompt. Entries past those that the current step wrote are stale, and their
    hidden states are ignored. In a bucket of at most ``capacity`` tokens the attribute is None, and the recording
    returns the hidden states of all tokens.
    """

    def __init__(self, key: GraphKey, spec: EngineSpec, device: torch.device):
        pad = (0, 0, spec.num_pages * spec.page_size, spec.max_running_requests)  # as in `GraphInputBuffers`
        self._pad = torch.tensor(pad, dtype=torch.int32, device=device)[:, None]
        self.tokens = ModelInputs(self._pad.repeat(1, key.rows), pending=True)
        capacity = self.capacity(spec)
        selects = key.rows > capacity
        self.logits_indices = torch.zeros(capacity, dtype=torch.int32, device=device) if selects else None

    @staticmethod
    def capacity(spec: EngineSpec) -> int:
        """Return the largest number of hidden states that a step needs which is replayed in pieces.

        It is two for each running request, and at least `MIN_CAPACITY`. Past the last attention, a recording with more
        tokens computes this number of them, whatever the step needs. So a larger number would slow down long prompts.
        """
        return max(2 * spec.max_running_requests, MIN_CAPACITY)

    def fill(self, tokens: ModelInputs, indices: Tensor) -> None:
        """Copy the tokens of a step, which are on the device already, into the buffers and pad the rest.

        ``indices`` int32 lists the tokens whose hidden states are needed, at most `capacity`.
        """
        n = tokens.packed.shape[1]
        self.tokens.packed[:, :n] = tokens.packed[: Line.SEQ_LEN]
        self.tokens.packed[:, n:] = self._pad
        if self.logits_indices is not None:
            self.logits_indices[: len(indices)] = indices


def repeats_few_reads(step: Step) -> bool:
    """Return whether the step has no prompts, and reads little KV twice if its tokens are decode rows."""
    if step.num_continuing < step.rows:
        return False
    repeated = (step.num_scheduled_tokens - 1) * (step.num_computed_tokens + step.num_scheduled_tokens)
    return int(repeated.sum()) <= MAX_REPEATED_TOKENS
