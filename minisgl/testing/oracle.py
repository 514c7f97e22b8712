"""The oracle of promise 8 on real models: transformers, in float64, teacher-forced with what minisgl generated.

Knows a model's directory and token ids. Nothing here is shared with the code that is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Oracle", "check_greedy"]


class Oracle:
    """A checkpoint as transformers computes it: in float64 unless ``dtype`` names another of torch's."""

    def __init__(self, model_dir: str | Path, dtype: str = "float64"):
        import torch
        import transformers

        self.dtype = getattr(torch, dtype)
        # Experts one by one: the grouped product that transformers prefers has no float64.
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self.dtype, experts_implementation="eager"
        )
        self.model = model.eval()

    def logits(self, ids: Any) -> Any:
        """A tensor [len(ids), vocab]: row i scores the token after ``ids[: i + 1]``."""
        import torch

        with torch.inference_mode():
            return self.model(torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0]

    def check(self, prompt_ids: Sequence[int], output_ids: Sequence[int], eps: float = 1e-4) -> None:
        """Raise AssertionError, naming the first token that is not within ``eps`` of its position's maximum."""
        self.check_all([prompt_ids], [output_ids], eps)

    def check_all(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], eps: float = 1e-4) -> None:
        """`check` for many at once. They stand in one batch, padded behind their ends, where nothing looks back."""
        import torch

        assert len(prompts) == len(outputs)
        assert all(len(output) > 0 for output in outputs), "there is nothing to check: an output is empty"
        given = [[*prompt, *output][:-1] for prompt, output in zip(prompts, outputs, strict=True)]
        longest = max(map(len, given))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in given])
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits
        assert logits.dtype == self.dtype
        for row, prompt, output in zip(logits, prompts, outputs, strict=True):
            _check(row[len(prompt) - 1 :], prompt, output, eps)


def _check(logits: Any, prompt: Sequence[int], output: Sequence[int], eps: float) -> None:
    best = logits.max(dim=-1)
    for i, token in enumerate(output):
        short = float(best.values[i] - logits[i, token])
        assert short <= eps, (
            f"output token {i} is {token}, whose logit is {short:.3g} below that of {int(best.indices[i])}; {eps:.1g} "
            f"is allowed. Prompt of {len(prompt)} tokens: {list(prompt)[:20]}…, output: {list(output)}"
        )


def check_greedy(
    model_dir: str | Path, prompt_ids: Sequence[int], output_ids: Sequence[int], eps: float = 1e-4
) -> None:
    """Raise AssertionError unless each of ``output_ids``, given what stands before it, is within ``eps`` of the
    greedy choice. To check many outputs of one model, keep an `Oracle`."""
    Oracle(model_dir).check(prompt_ids, output_ids, eps)
