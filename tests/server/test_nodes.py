"""A server of two torchrun groups on this machine.

``make check-nodes`` runs the other tests of such servers, in ``check_nodes.py``, which take minutes.
"""

from __future__ import annotations

import time

import httpx

from minisgl import LLM, SamplingParams
from minisgl.testing.nodes import Nodes
from minisgl.testing.serving import patient_timeout

OPTIONS = ["model=tutor", "num_pages=512", "server.tokenizers=0"]
PROMPTS = ["What is a KV cache?", "Explain paged attention.", "def f(x):"]


def test_promise_10_two_nodes() -> None:
    """Two nodes answer as two ranks of one process group do. When rank 1 is killed, all processes end within 5 s."""
    with LLM("tutor", overrides=["device=cpu", "tp=2", "num_pages=512"]) as llm:
        expected = [out.text for out in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))]
    with Nodes(*OPTIONS) as nodes:
        body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"{nodes.url}/v1/completions", json=body, timeout=60).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert nodes.output(1) == "" and nodes.rank(1).children() == []  # no HTTP, and one process
        long = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{nodes.url}/v1/completions", json=long, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data:")
            killed = time.monotonic()
            nodes.rank(1).kill()
            rest = list(lines)
        nodes.seconds_until_gone()
        assert time.monotonic() - killed < patient_timeout(5)
        assert "rank 1 (127.0.0.1): it has ended" in "".join(rest)
        assert nodes.statuses() == [1, 1]
        assert nodes.leftovers() == []
