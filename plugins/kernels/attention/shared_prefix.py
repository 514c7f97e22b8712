"""Detection of a prefix that all rows of a decode step share, for backends that read its KV once, not once per row.

`with_shared_prefix` lets the builder of a runner's inputs look for it: see `AttnBatch.shared_prefix_len`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttnBatch
from minisgl.core import Step
from minisgl.engine.inputs import InputBuilder, ModelInputs
from minisgl.engine.model_runner import ModelRunner

__all__ = ["SharedPrefixInputs", "with_shared_prefix"]

MIN_SAVED_TOKENS = 1 << 15
"""The smallest saving, in tokens of KV reads, at which attention reads the prefix of all decode rows separately.

Reading the KV of the common prefix once, instead of once per row, saves prefix length · (rows - 1) tokens of KV reads.
The separate pass itself costs about as much as reading this number of tokens with eight KV heads (measured on an H200).
"""


class SharedPrefixInputs(InputBuilder):
    """An `InputBuilder` that finds shared prefixes."""

    shared_prefix_len: Tensor

    def find_shared_prefix(self, step: Step) -> bool:
        """Return whether all rows of a decode step share a prefix long enough to be worth a separate pass.

        If so, write the length of the prefix in tokens, a multiple of the page size, to `shared_prefix_len` on the
        device. The search is a binary search over page columns: two rows with the same page in column c have the same
        tokens in all columns up to c, because the content of a page determines the tokens before it.
        """
        size = self.spec.page_size
        # In pages. The token that a row computes in this step is not shared, so its page does not count.
        low, high = 0, int(step.num_computed_tokens.min()) // size
        if high * size * (step.rows - 1) < MIN_SAVED_TOKENS:
            return False
        probe = -(-MIN_SAVED_TOKENS // (size * (step.rows - 1)))  # the shortest prefix, in pages, that is worth it
        while low < high:
            column = self.page_table_cpu[step.req_pool_indices, probe - 1]
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

    def build(self, step: Step) -> tuple[ModelInputs, AttnBatch]:
        """Build the inputs of a step, in whose batch attention finds the length of the prefix that all rows share."""
        inputs, batch = super().build(step)
        if step.num_decode == step.rows and self.find_shared_prefix(step):
            batch = replace(batch, shared_prefix_len=self.shared_prefix_len)
        return inputs, batch


def with_shared_prefix(device: torch.device) -> Callable[..., Any]:
    """Return what the hook `minisgl_wrap_runner` returns: a function that changes the builder of a runner's inputs.

    The device memory for the length is allocated now.
    """
    length = torch.zeros(1, dtype=torch.int32, device=device)

    def wrap(runner: Any, model_runner: ModelRunner) -> Any:
        if model_runner.attention.needs().shared_prefix:
            inputs: Any = model_runner.inputs
            inputs.__class__, inputs.shared_prefix_len = SharedPrefixInputs, length
        return runner

    return wrap
