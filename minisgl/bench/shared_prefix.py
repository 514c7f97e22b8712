"""Requests with a common prefix over HTTP, for `minisgl.bench.cpu`: the server is minisgl or llama.cpp.

Both have the route ``/v1/completions``, which takes prompts as token ids. All requests arrive at once.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from minisgl.config import ConfigError
from minisgl.testing.serving import Server

REQUESTS, PREFIX, OWN, OUTPUT = 16, 512, 16, 32
"""Number of requests; tokens of the common prefix, of the rest of each prompt, and of each output."""
TIMEOUT = 1800.0


@contextmanager
def minisgl_server(options: Sequence[str], threads: int) -> Iterator[str]:
    """Start ``python -m minisgl`` with ``options``, and yield its address."""
    with Server(*options, timeout=TIMEOUT, env={"OMP_NUM_THREADS": str(threads)}, attached=True) as server:
        yield server.url


@contextmanager
def other_server(command: Sequence[str]) -> Iterator[str]:
    """Start a server that prints its address, and ends when its standard input does. Yield the address."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        address = next((line.strip() for line in process.stdout if line.startswith("http")), "")
        if not address:
            raise ConfigError(f"{command[0]} printed no address of a server.")
        yield address
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tokens_per_second(address: str, vocabulary: int, seed: int = 0) -> float:
    """Return the output tokens per second of all requests together. A short request before them warms up the server.

    Raises `ConfigError` if a request ends early.
    """
    numbers = random.Random(seed)
    prefix = [numbers.randrange(vocabulary) for _ in range(PREFIX)]
    prompts = [prefix + [numbers.randrange(vocabulary) for _ in range(OWN)] for _ in range(REQUESTS)]
    _complete(address, [numbers.randrange(vocabulary) for _ in range(8)], 4)
    with ThreadPoolExecutor(REQUESTS) as pool:
        start = time.perf_counter()
        counts = list(pool.map(lambda prompt: _complete(address, prompt, OUTPUT), prompts))
        seconds = time.perf_counter() - start
    if counts != [OUTPUT] * REQUESTS:
        raise ConfigError(f"the answers of {address} have {counts} tokens, not {OUTPUT} each.")
    return sum(counts) / seconds


def _complete(address: str, prompt: list[int], output: int) -> int:
    """Return the number of tokens of a greedy completion."""
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return int(json.load(response)["usage"]["completion_tokens"])
