"""Tensor parallelism over several GPUs: promise 8 with tp=2 and tp=4, a streaming server, promise 10 if a rank dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.models.shipped import weights_dir
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.idle import check_idle
from minisgl.testing.oracle import Oracle
from minisgl.testing.serving import Server

pytest.importorskip("transformers", reason="transformers writes the checkpoints and is the oracle")
QUESTIONS = ("What is a radix cache?", "What is 17 + 25?", "Count from 3 to 9.", "Hello!")


@pytest.fixture(autouse=True)
def enough_gpus(request: pytest.FixtureRequest) -> None:
    """Skip the test if there are fewer GPUs than the test's ``tp``."""
    tp = request.node.callspec.params.get("tp", 2) if hasattr(request.node, "callspec") else 2
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} CUDA devices")


@pytest.mark.parametrize("graph", ["cuda", "none"])
@pytest.mark.parametrize("communicator", ["nccl", "torch"])
@pytest.mark.parametrize(("model", "tp"), [("qwen3", 2), ("qwen3", 4), ("qwen3_moe", 2)])
def test_promise_8_float32(model: str, tp: int, communicator: str, graph: str, tmp_path: Path) -> None:
    """Greedy tokens of random models are those of transformers."""
    if graph == "none" and (model, tp) != ("qwen3", 2):
        pytest.skip("without graphs only one model is tested")
    path = tiny_checkpoint(model, tmp_path)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 320, 35).tolist()
    prompts = [(shared if i % 2 else []) + rng.integers(3, 320, 1 + 3 * i).tolist() for i in range(24)]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    words = ["dtype=float32", "attention=triton", "num_pages=1024", "max_running_requests=40", "max_prefill_tokens=48"]
    with LLM(str(path), overrides=[*words, f"tp={tp}", f"communicator={communicator}", f"graph={graph}"]) as llm:
        outputs = [output.token_ids for output in llm.generate(prompts, greedy)]
        check_idle(llm.scheduler)
    Oracle(path).check_all(prompts, outputs)


@pytest.mark.parametrize("communicator", ["nccl", "torch"])
@pytest.mark.parametrize("tp", [2, 4])
def test_promise_8_bfloat16(tp: int, communicator: str) -> None:
    """Greedy tokens in a batch of 64 are those of transformers, up to ties within rounding.

    The tolerance is twice the largest difference between the log-probabilities of batch 1 and of batch 64.
    """
    path = weights_dir("tutor")
    words = ["dtype=bfloat16", "num_pages=8192", f"tp={tp}", f"communicator={communicator}", "graph=cuda"]
    greedy = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    with LLM(str(path), overrides=words) as llm:
        texts = [f"<|im_start|>user\n{QUESTIONS[i % 4]}<|im_end|>\n<|im_start|>assistant\n" for i in range(64)]
        prompts = [llm.tokenizer.encode(text) for text in texts]  # type: ignore[union-attr]
        alone = [llm.generate([prompt], greedy)[0] for prompt in prompts[:4]]
        batch = llm.generate(prompts, greedy)
        check_idle(llm.scheduler)
    spread = 0.0
    for one, many in zip(alone, batch[:4], strict=True):
        for a, b in zip(one.logprobs or (), many.logprobs or (), strict=False):
            spread = max(spread, abs(a.chosen - b.chosen))
    assert spread < 0.2, "batch 1 and batch 64 differ by more than bfloat16 explains"
    Oracle(path).check_all(prompts, [output.token_ids for output in batch], eps=max(2 * spread, 0.02))


@pytest.mark.parametrize("communicator", ["nccl", "torch"])
def test_promise_10_dead_rank(communicator: str) -> None:
    """If a rank dies within a step, ``generate`` raises an error within seconds.

    The other rank's GPU waits inside a collective for the dead rank; only the end of its process ends the wait.
    """
    program = (
        "import threading, time, psutil\n"
        "from minisgl import LLM, SamplingParams\n"
        "from minisgl.core import EngineDeadError\n"
        f"words = ['device=cuda', 'tp=2', 'num_pages=512', 'communicator={communicator}']\n"
        "with LLM('tutor', overrides=words) as llm:\n"
        "    follower = psutil.Process().children()[0]\n"
        "    def kill():\n"
        "        time.sleep(0.3)\n"
        "        follower.suspend()\n"
        "        time.sleep(1)\n"
        "        follower.kill()\n"
        "    params = SamplingParams(max_tokens=1900, temperature=0.0, ignore_eos=True)\n"
        "    llm.generate([[5, 6]], SamplingParams(max_tokens=4))\n"
        "    threading.Thread(target=kill).start()\n"
        "    start = time.monotonic()\n"
        "    try:\n"
        "        llm.generate([[5, 6, i] for i in range(8)], params)\n"
        "    except EngineDeadError as error:\n"
        "        print(f'dead after {time.monotonic() - start:.2f} s: {error}', flush=True)\n"
        "print('ends', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert "rank 1 ended with status -9" in done.stdout, done.stdout + done.stderr
    assert float(re.findall(r"dead after ([\d.]+) s", done.stdout)[0]) < 3
    assert done.stdout.endswith("ends\n")
    assert done.returncode == 0, done.stderr


def stream_chat(server: Server, **more: Any) -> Any:
    """Start a streaming chat completion with the OpenAI client and return its events."""
    openai = pytest.importorskip("openai", reason="the client is the test")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is tensor parallelism?"}]
    return client.chat.completions.create(model="tutor", messages=messages, temperature=0, stream=True, **more)


def test_server_on_two_gpus() -> None:
    """A server on two GPUs streams to the OpenAI client; then promise 10: after a rank was killed, the server exits."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")
    with Server("device=cuda", "attention=flashinfer", "cache=radix", "tp=2", "communicator=nccl") as server:
        pieces = [event.choices[0].delta.content or "" for event in stream_chat(server) if event.choices]
        assert len(pieces) > 5
        assert "GPU" in "".join(pieces) or "rank" in "".join(pieces), "".join(pieces)

        broken: list[BaseException] = []
        began = threading.Event()

        def long_answer() -> None:
            try:
                for _ in stream_chat(server, max_tokens=1500, extra_body={"ignore_eos": True}):
                    began.set()
            except BaseException as error:
                broken.append(error)

        thread = threading.Thread(target=long_answer, daemon=True)
        thread.start()
        assert began.wait(20)
        server.record_resources()
        died = time.monotonic()
        os.kill(server.workers()["scheduler-1"], signal.SIGKILL)
        assert server.wait(20) == 1
        thread.join(10)
        assert broken, "the client was not told"
        assert time.monotonic() - died < 15
        assert "scheduler-1 died: it was killed by SIGKILL" in server.log()
        for _ in range(50):
            if not (left := server.leftovers()):
                break
            time.sleep(0.1)
        assert left == []
