"""``prompt_logprobs`` of an `LLM` against transformers: with chunks, a cached prefix, and a first position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM, RequestOutput
from minisgl.testing.checkpoints import ARCHITECTURES, WITH_STATES, tiny_checkpoint
from minisgl.testing.oracle import Oracle

WORDS = ["device=cpu", "max_running_requests=4", "num_pages=80", "page_size=4"]


def check(output: RequestOutput, prompt: list[int], start: int, expected: torch.Tensor) -> None:
    """Compare every entry with transformers' log-probabilities [tokens, vocab] in float32."""
    entries = output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    for position, entry in enumerate(entries):
        if position < max(start, 1):
            assert entry is None
            continue
        assert entry is not None
        assert entry.chosen == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
        assert list(entry.top_ids) == expected[position - 1].topk(2).indices.tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equal_to_transformers(architecture: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(architecture, tmp_path)
    prompt: list[int] = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = Oracle(path, "float32").logits(prompt).log_softmax(-1)
    with LLM(str(path), overrides=[*WORDS, "max_prefill_tokens=16", "cache=radix"]) as llm:
        for start in (0, 30, 59, 60):  # after the first run, the prefix cache has the prompt
            params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2, logprob_start_len=start)
            (output,) = llm.generate([prompt], params)
            check(output, prompt, start, expected)
            assert output.cached_tokens <= max(start - 1, 0)
        plain, scored = llm.generate([prompt, prompt], [SamplingParams(max_tokens=2, temperature=0), params])
    # A request without prompt_logprobs uses the whole cached prompt, unless its pages hold no state.
    assert plain.cached_tokens == (0 if architecture in WITH_STATES else 56)
    assert plain.token_ids == scored.token_ids == output.token_ids
