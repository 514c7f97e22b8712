"""A baseline for the offline benchmark: transformers' ``generate`` on the same requests, in padded batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.workload import SampleRequest


@dataclass
class TransformersResult:
    """Counts and times of the baseline.

    Times are in seconds. A batch generates until its longest output is complete; only the tokens up to each request's
    own output length are counted.
    """

    version: str
    batch: int
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    same_outputs: int
    """Number of requests whose greedy output equals minisgl's. Rounding may change a token with a close second."""

    def plain(self) -> dict[str, Any]:
        """Return the fields as a dict, for JSON."""
        return asdict(self)


def run_transformers(
    path: Path,
    requests: Sequence[SampleRequest],
    ours: dict[int, list[int]],
    device: str,
    dtype: str,
    batch: int = 16,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> TransformersResult:
    """Generate greedily, ``batch`` requests at a time, in the order of the requests.

    Prompts are padded on the left, with an attention mask. ``ours`` are minisgl's outputs by index of the request.
    ``on_tokens`` is called after each batch with the number of counted tokens.
    """
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=model.config.bos_token_id
    )

    def generate(part: Sequence[SampleRequest]) -> list[list[int]]:
        max_len = max(len(request.prompt_ids) for request in part)
        ids = torch.zeros(len(part), max_len, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(part):
            start = max_len - len(request.prompt_ids)
            ids[row, start:] = torch.tensor(request.prompt_ids)
            mask[row, start:] = 1
        max_new_tokens = max(request.output_len for request in part)
        out = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens)
        return [row[max_len : max_len + req.output_len] for row, req in zip(out.tolist(), part, strict=True)]

    with torch.inference_mode():
        generate([SampleRequest(requests[0].prompt_ids[:8], 2)])  # warm up
        start = time.perf_counter()
        theirs: list[list[int]] = []
        for i in range(0, len(requests), batch):
            part = requests[i : i + batch]
            theirs += generate(part)
            on_tokens(sum(request.output_len for request in part))
        seconds = time.perf_counter() - start
    generated = sum(map(len, theirs))
    return TransformersResult(
        version=f"transformers {transformers.__version__}",
        batch=batch,
        seconds=seconds,
        output_tokens=generated,
        output_tokens_per_second=generated / seconds,
        same_outputs=sum(tokens == ours[i] for i, tokens in enumerate(theirs)),
    )
