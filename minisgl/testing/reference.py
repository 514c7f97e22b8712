"""What transformers computes for a checkpoint: the oracle for logits and for greedy tokens (promise 8).

Knows transformers (imported when used) and nothing of minisgl's engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Reference"]


class Reference:
    """transformers' model of a checkpoint, on the CPU; float64 unless told otherwise."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float64):
        import transformers

        was_shown = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        finally:
            if was_shown:
                transformers.utils.logging.enable_progress_bar()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int] | Tensor) -> Tensor:
        """[len(ids), vocab]: row i scores the token after ids[: i + 1]."""
        return self.model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0]

    def gap(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """How far the worst token of a greedy ``output`` is below the best one, both scored after the same prefix
        (teacher-forced). 0.0 where transformers would have chosen each of them, or there is none."""
        if not len(output):
            return 0.0
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.as_tensor(output, dtype=torch.long)[:, None])[:, 0]
        return float((logits.max(dim=1).values - chosen).max())
