"""What a benchmark asks for: prompts as token ids, and how many tokens each is continued by. From a seed or a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minisgl.config import ConfigError
from minisgl.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    output: int  # tokens


def parse_range(text: str) -> tuple[int, int]:
    """``"16:256"`` or ``"64"`` as (lowest, highest), both possible. Raises `ConfigError`."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"{text!r} is no range of tokens: write LOW:HIGH, or one number, from 1 on.")
    return found


def random_asks(
    count: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab_size: int, seed: int, shared: int = 0
) -> list[Ask]:
    """``count`` requests of random tokens with lengths drawn uniformly; all begin with the same ``shared`` tokens,
    which come on top of ``inputs``."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, shared).tolist()
    ins = rng.integers(inputs[0], inputs[1] + 1, count)
    outs = rng.integers(outputs[0], outputs[1] + 1, count)
    return [
        Ask(prefix + rng.integers(0, vocab_size, n).tolist(), m)
        for n, m in zip(ins.tolist(), outs.tolist(), strict=True)
    ]


def read_asks(path: Path, tokenizer: Tokenizer | None, default_output: int) -> list[Ask]:
    """One JSON object a line: ``prompt`` (a text, or token ids) and ``max_tokens``. Raises `ConfigError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    asks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, output = entry["prompt"], int(entry.get("max_tokens", default_output))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path}:{number} is no request: write {{"prompt": "…" or [ids], "max_tokens": n}}. ({error!r})'
            ) from error
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ConfigError(f"{path}:{number}: the model has no tokenizer, so prompts must be token ids.")
            prompt = tokenizer.encode(prompt)
        asks.append(Ask([int(token) for token in prompt], output))
    if not asks:
        raise ConfigError(f"{path} holds no request.")
    return asks
