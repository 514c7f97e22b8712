"""Reads trace files: when requests arrived, their lengths, and which of them share prefixes.

The format is recognized by the first character or line of the file, never by its name. A file may be compressed with
gzip. Three formats:

- Azure's CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``, with a date and a time of day;
- Mooncake's JSON lines: ``timestamp`` in milliseconds, ``input_length``, ``output_length``, ``hash_ids``;
- ShareGPT's JSON, a list of conversations, which vLLM's benchmarks read: texts without times.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError

HASH_BLOCK = 512
"""Tokens per entry of ``hash_ids``."""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    ``timestamp`` is in seconds; None in a format without times. Equal ``hash_ids`` are equal blocks of `HASH_BLOCK`
    tokens at the beginning of the prompt. ``prompt`` is the text, or its token ids, if the trace contains it. With a
    prompt as text, ``input_len`` is 0 until `with_tokenizer` counts its tokens.
    """

    timestamp: float | None
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    reference: str = ""
    """The answer in a ShareGPT file, whose length is the output length."""


def read_trace(path: Path, default_output: int = 128) -> list[TraceRequest]:
    """Return the requests of a trace file in order of arrival. Raise `ConfigError` if the file cannot be read.

    ``default_output`` is the output length in a format that has none.
    """
    text = _read_text(path)
    start = text.lstrip()[:1]
    if not start:
        raise ConfigError(f"trace={path}: the file is empty.")
    if start == "[":
        requests = _share_gpt(path, text, default_output)
    else:
        read = _mooncake if start == "{" else _azure
        requests = list(read(path, text))
        requests.sort(key=lambda request: request.timestamp or 0.0)
    if not requests:
        raise ConfigError(f"trace={path}: the file has no request.")
    return requests


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"trace={path} cannot be read: {error}") from error


def _azure(path: Path, text: str) -> Iterator[TraceRequest]:
    lines = csv.DictReader(text.splitlines())
    names = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not names <= set(lines.fieldnames or ()):
        raise ConfigError(
            f"trace={path}: the format is not known. The first line of a CSV trace is {','.join(sorted(names))}, "
            'in any order; a line of a JSON trace is {"timestamp": …, "input_length": …, "output_length": …}.'
        )
    for line in lines:
        with _at_line(path, lines.line_num):
            yield _request(_seconds(line["TIMESTAMP"]), int(line["ContextTokens"]), int(line["GeneratedTokens"]))


def _seconds(timestamp: str) -> float:
    """Return the seconds since 1970 of a time such as ``2023-11-16 18:15:46.6805900`` (UTC; 100 ns are cut to 1 µs)."""
    whole, _, fraction = timestamp.strip().removesuffix("Z").removesuffix("+00:00").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _mooncake(path: Path, text: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        with _at_line(path, number):
            entry = json.loads(line)
            hash_ids = tuple(int(h) for h in entry.get("hash_ids") or ())
            yield _request(
                float(entry["timestamp"]) / 1000.0, int(entry["input_length"]), int(entry["output_length"]), hash_ids
            )


def _request(timestamp: float, input_len: int, output_len: int, hash_ids: tuple[int, ...] = ()) -> TraceRequest:
    """Return the request; an output of 0 tokens becomes 1 token, the least that a server computes."""
    if input_len < 1 or output_len < 0 or min(hash_ids, default=0) < 0:
        raise ValueError(f"lengths {input_len} and {output_len}: at least 1 and 0 are expected, and no negative id")
    return TraceRequest(timestamp, input_len, max(output_len, 1), hash_ids)


class _at_line:  # noqa: N801 - a context manager that is used as a function
    """Turn the errors of parsing a line into a `ConfigError` that names the line."""

    def __init__(self, path: Path, number: int):
        self.path, self.number = path, number

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | KeyError | TypeError | AttributeError) and not isinstance(error, ConfigError):
            raise ConfigError(f"trace={self.path}:{self.number} is not a request: {error!r}") from error


def _share_gpt(path: Path, text: str, default_output: int) -> list[TraceRequest]:
    """Return one request per conversation of two turns or more: the first turn, with the second as the answer."""
    try:
        entries = json.loads(text)
        turns = [[str(turn["value"]) for turn in entry["conversations"][:2]] for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'trace={path} is not a list of {{"conversations": [{{"from": …, "value": …}}, …]}}: {error!r}'
        ) from error
    return [
        TraceRequest(None, 0, default_output, prompt=pair[0], reference=pair[1]) for pair in turns if len(pair) == 2
    ]


def with_tokenizer(
    requests: Sequence[TraceRequest], encode: Callable[[str], Sequence[int]], as_ids: bool
) -> list[TraceRequest]:
    """Return the requests with the lengths of their texts in tokens, and with prompts as ids if ``as_ids`` is set.

    A prompt or an answer of fewer than 4 tokens is left out, as ``vllm bench serve`` does.
    """
    found = []
    for request in requests:
        if not isinstance(request.prompt, str):
            found.append(request)
            continue
        ids, output_len = tuple(encode(request.prompt)), len(encode(request.reference))
        if min(len(ids), output_len) >= 4:
            prompt: Any = ids if as_ids else request.prompt
            found.append(TraceRequest(request.timestamp, len(ids), output_len, (), prompt))
    return found


def within(requests: Sequence[TraceRequest], max_len: int) -> list[TraceRequest]:
    """Return the requests whose prompt and output have at most ``max_len`` tokens together."""
    return [request for request in requests if request.input_len + request.output_len <= max_len]
