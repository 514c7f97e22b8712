"""Fixtures of the server tests. A server is started once per session, when the first test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.serving import Server


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random Llama with a byte-level tokenizer and 8192 positions."""
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_checkpoint("llama", folder, tokenizer=True, max_position_embeddings=8192)


@pytest.fixture(scope="session")
def tutor() -> Iterator[Server]:
    """Start a server with the embedded model and one tokenizer process."""
    with Server("model=tutor", "num_pages=512") as server:
        yield server


@pytest.fixture(scope="session")
def client(tutor: Server) -> Iterator[openai.OpenAI]:
    with client_of(tutor) as client:
        yield client
