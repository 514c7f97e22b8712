"""The requests of a benchmark: prompts as token ids, and output lengths. They come from a random seed or a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minisgl.config import ConfigError
from minisgl.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleRequest:
    """One request of a benchmark. The output has exactly ``output_len`` tokens."""

    prompt_ids: list[int]
    output_len: int


def parse_range(text: str) -> tuple[int, int]:
    """Return the range ``"16:256"`` or ``"64"`` as (lowest, highest), both inclusive. Raises `ConfigError`."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"{text!r} is not a range of tokens: write LOW:HIGH or one number, at least 1.")
    return found


def random_requests(
    count: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab_size: int, seed: int, shared: int = 0
) -> list[SampleRequest]:
    """Return ``count`` requests of random tokens, with lengths drawn uniformly from ``inputs`` and ``outputs``.

    All prompts begin with the same ``shared`` tokens, in addition to the tokens that ``inputs`` counts.
    """
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, shared).tolist()
    ins = rng.integers(inputs[0], inputs[1] + 1, count)
    outs = rng.integers(outputs[0], outputs[1] + 1, count)
    return [
        SampleRequest(prefix + rng.integers(0, vocab_size, n).tolist(), m)
        for n, m in zip(ins.tolist(), outs.tolist(), strict=True)
    ]


def read_requests(path: Path, tokenizer: Tokenizer | None, default_output: int) -> list[SampleRequest]:
    """Read requests from a file of JSON lines: ``prompt`` (text or token ids) and ``max_tokens``.

    ``default_output`` is used where ``max_tokens`` is missing. Raises `ConfigError`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, output = entry["prompt"], int(entry.get("max_tokens", default_output))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path}:{number} is not a request: write {{"prompt": "…" or [ids], "max_tokens": n}}. ({error!r})'
            ) from error
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ConfigError(f"{path}:{number}: the model has no tokenizer, so prompts must be token ids.")
            prompt = tokenizer.encode(prompt)
        requests.append(SampleRequest([int(token) for token in prompt], output))
    if not requests:
        raise ConfigError(f"{path} contains no request.")
    return requests
