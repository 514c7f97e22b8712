"""Checks generated tokens against transformers in float64, for promise 8 on real models.

transformers computes the logits of a prompt followed by the tokens that minisgl generated (teacher forcing). The oracle
needs a model's directory and token ids, and shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Oracle", "check_greedy"]


class Oracle:
    """A checkpoint, computed by transformers in ``dtype``, the name of a torch dtype."""

    def __init__(self, model_dir: str | Path, dtype: str = "float64"):
        import torch
        import transformers

        self.dtype = getattr(torch, dtype)
        # "eager" computes experts one by one: transformers' grouped matrix product does not support float64.
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self.dtype, experts_implementation="eager"
        )
        self.model = model.eval()

    def logits(self, ids: Any) -> Any:
        """Return the logits of ``ids``, [len(ids), vocab]. Row i scores the token after ``ids[: i + 1]``."""
        import torch

        with torch.inference_mode():
            return self.model(torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0]

    def check(self, prompt_ids: Sequence[int], output_ids: Sequence[int], eps: float = 1e-4) -> None:
        """Raise AssertionError if the logit of an output token is more than ``eps`` below its position's maximum.

        The message names the first such token.
        """
        self.check_all([prompt_ids], [output_ids], eps)

    def check_all(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], eps: float = 1e-4) -> None:
        """Do `check` for many outputs in one batch.

        Padding follows the end of each sequence, where causal attention of the sequence's tokens does not read.
        """
        import torch

        assert len(prompts) == len(outputs), f"expected one output per prompt; got {len(outputs)} for {len(prompts)}"
        assert all(len(output) > 0 for output in outputs), "expected at least one token in each output; one is empty"
        sequences = [[*prompt, *output][:-1] for prompt, output in zip(prompts, outputs, strict=True)]
        longest = max(map(len, sequences))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits
        assert logits.dtype == self.dtype, f"expected logits of {self.dtype}; transformers returned {logits.dtype}"
        for row, prompt, output in zip(logits, prompts, outputs, strict=True):
            _check(row[len(prompt) - 1 :], prompt, output, eps)


def _check(logits: Any, prompt: Sequence[int], output: Sequence[int], eps: float) -> None:
    best = logits.max(dim=-1)
    for i, token in enumerate(output):
        gap = float(best.values[i] - logits[i, token])
        assert gap <= eps, (
            f"output token {i} is {token}, whose logit is {gap:.3g} below the largest logit, of token "
            f"{int(best.indices[i])}; expected at most {eps:.1g}. Prompt of {len(prompt)} tokens: "
            f"{list(prompt)[:20]}…, output: {list(output)}"
        )


def check_greedy(
    model_dir: str | Path, prompt_ids: Sequence[int], output_ids: Sequence[int], eps: float = 1e-4
) -> None:
    """Raise AssertionError if the logit of an output token is more than ``eps`` below the greedy choice's logit.

    Each token is scored given the prompt and the output tokens before it. To check many outputs of one model, build one
    `Oracle` and call its methods: this function loads the model each time.
    """
    Oracle(model_dir).check(prompt_ids, output_ids, eps)
