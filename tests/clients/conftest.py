"""A server that records its requests, and the results of each client's script."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.models.resolve import resolve_model
from minisgl.testing.serving import Server, patient_timeout

from .catalog import FOLDER, Client

QUESTION = "What is a KV cache?"
"""The question of the scripts."""
FOREIGN = ("OPENAI_", "ANTHROPIC_", "PYTHON")
"""Environment variables that begin so are not for the clients."""
QUIET = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""With these, the clients call no server but ours."""


@dataclass(frozen=True)
class Ran:
    """What a script reported, by case, and the requests that the server got meanwhile."""

    results: dict[str, dict[str, Any]]
    requests: list[dict[str, Any]]


@pytest.fixture(scope="session")
def requests_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients") / "requests.jsonl"


@pytest.fixture(scope="session")
def server(requests_file: Path) -> Iterator[Server]:
    """Start a server with the embedded model, which records its requests."""
    options = ("model=tutor", "num_pages=512", f"plugins={FOLDER / 'recorder.py'}")
    with Server(*options, env={"MINISGL_REQUESTS": str(requests_file)}) as running:
        yield running


@pytest.fixture(scope="session")
def answer(server: Server) -> str:
    """Return the greedy answer to `QUESTION`."""
    body = {"model": "tutor", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    return response.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="session")
def run_client(server: Server, requests_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """Return a function that runs a client's script, once, and returns its results."""
    done: dict[str, Ran] = {}

    def run(client: Client) -> Ran:
        if client.name not in done:
            out = tmp_path_factory.mktemp(client.name) / "results.json"
            requests_file.write_text("")
            inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
            ran = subprocess.run(
                [*client.command, str(out)],
                env={**inherited, **QUIET, "MINISGL_URL": server.url, "MINISGL_MODEL": str(resolve_model("tutor"))},
                cwd=out.parent,
                capture_output=True,
                text=True,
                timeout=patient_timeout(200),
                check=False,
            )
            assert out.exists(), f"{client.script} failed:\n{ran.stderr[-4000:]}"
            lines = requests_file.read_text().splitlines()
            done[client.name] = Ran(json.loads(out.read_text()), [json.loads(line) for line in lines])
        return done[client.name]

    return run
