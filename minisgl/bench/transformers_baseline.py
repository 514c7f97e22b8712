"""The yardstick: transformers' ``generate`` on the same requests, in padded batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.workload import Ask


@dataclass
class Reference:
    """Times in seconds. Only tokens that a request asked for count, not those that padding to the batch's longest
    output makes."""

    version: str
    batch: int
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    same_outputs: int
    """Requests whose greedy tokens are all equal to minisgl's. (A near-tie may go either way.)"""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def run_transformers(
    path: Path,
    asks: Sequence[Ask],
    ours: dict[int, list[int]],
    device: str,
    dtype: str,
    batch: int = 16,
    seen: Callable[[int], None] = lambda tokens: None,
) -> Reference:
    """Greedy, in the order of the requests, ``batch`` at a time: padded on the left, with an attention mask; each
    batch runs until its longest output is done."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=model.config.bos_token_id
    )

    def generate(part: Sequence[Ask]) -> list[list[int]]:
        longest = max(len(ask.prompt) for ask in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(part):
            ids[row, longest - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, longest - len(ask.prompt) :] = 1
        out = model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=max(ask.output for ask in part)
        )
        return [row[longest : longest + ask.output] for row, ask in zip(out.tolist(), part, strict=True)]

    with torch.inference_mode():
        generate([Ask(asks[0].prompt[:8], 2)])  # warm
        start = time.perf_counter()
        theirs: list[list[int]] = []
        for i in range(0, len(asks), batch):
            part = asks[i : i + batch]
            theirs += generate(part)
            seen(sum(ask.output for ask in part))
        seconds = time.perf_counter() - start
    made = sum(map(len, theirs))
    return Reference(
        version=f"transformers {transformers.__version__}",
        batch=batch,
        seconds=seconds,
        output_tokens=made,
        output_tokens_per_second=made / seconds,
        same_outputs=sum(tokens == ours[i] for i, tokens in enumerate(theirs)),
    )
