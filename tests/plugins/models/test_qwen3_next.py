"""Qwen3-Next: chunks, pages and ranks; aborts; what is refused; the tensors of multi-token prediction."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.plugins.models.gated_delta import CHUNK, delta_rule
from minisgl.plugins.models.qwen3_next import Qwen3NextForCausalLM
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.model import ModelConformance
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel


class TestQwen3Next(ModelConformance):
    architecture = "qwen3_next"

    def make(self) -> type:
        """Return the model class to test."""
        return Qwen3NextForCausalLM


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_next", tmp_path_factory.mktemp("qwen3_next"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint without experts, which moe=torch can't record in a graph."""
    return tiny_checkpoint("qwen3_next", tmp_path_factory.mktemp("dense"), mlp_only_layers=[*range(4)])


def test_delta_rule_is_the_recurrence() -> None:
    """A chunk at once is what one token after another is, from any state, and with decays that make exp underflow."""
    generator = torch.Generator().manual_seed(0)
    n, dk, dv = CHUNK - 5, 8, 12
    q, k, v = (torch.randn(2, 3, n, dim, generator=generator) for dim in (dk, dk, dv))
    k = k / k.norm(dim=-1, keepdim=True)
    beta, log_decay = torch.rand(2, 3, n, generator=generator), -20 * torch.rand(2, 3, n, generator=generator) ** 4
    state = torch.randn(2, 3, dk, dv, generator=generator)
    got, end = delta_rule(q, k, v, beta, log_decay, state)
    for i in range(n):
        state = log_decay[..., i, None, None].exp() * state
        u = beta[..., i, None] * (v[..., i, :] - (k[..., i, :, None] * state).sum(-2))
        state = state + k[..., i, :, None] * u[..., None, :]
        torch.testing.assert_close(got[..., i, :], (q[..., i, :, None] * state).sum(-2), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(end, state, atol=2e-5, rtol=1e-4)


def test_prompt_of_several_chunks_of_the_rule(path: Path) -> None:
    ids = torch.randint(0, 320, (2 * CHUNK + 9,), generator=torch.Generator().manual_seed(3))
    model = PagedModel(path, max_seq_len=2 * CHUNK + 16, max_running_requests=2)
    (got,) = model.run([(0, 0, ids[:-5])])
    (rest, other) = model.run([(0, len(ids) - 5, ids[-5:]), (1, 0, ids[:5])])  # equally long: absorbed together
    expected = Oracle(path, "float32").logits(ids)
    torch.testing.assert_close(torch.cat((got, rest)), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(other, expected[:5], atol=2e-4, rtol=0)


def test_row_of_an_aborted_request_is_used_again(path: Path) -> None:
    """With one row, the next request gets the row of the aborted one, and begins with an empty state."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(path), overrides=["device=cpu", "max_running_requests=1", "num_pages=64"]) as llm:
        llm.scheduler.add_request(900, list(range(5, 60)), greedy)
        for _ in range(4):
            llm.scheduler.step()
        llm.scheduler.abort_request(900)
        output = llm.generate([[7, 8, 9]], greedy)[0].token_ids
        assert llm.scheduler.stats()["finished_abort"] == 1
    Oracle(path).check([7, 8, 9], list(output))


@pytest.mark.parametrize(("page_size", "num_pages", "spacing", "tp"), [(1, 260, 24, 1), (16, 22, 16, 2)])
def test_promise_8_with_saved_states(page_size: int, num_pages: int, spacing: int, tp: int, path: Path) -> None:
    """Hit and miss give equal answers: alone and eight at a time, with prompts of several chunks, and retractions."""
    sizes = f"page_size={page_size} num_pages={num_pages} cache.spacing={spacing} tp={tp} cache.snapshots=6"
    words = f"device=cpu cache=states max_prefill_tokens=40 max_seq_len=160 max_running_requests=8 {sizes}"
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    long = [(7 * i * i + 3) % 320 for i in range(100)]
    prompts = [long, [*long[:60], 5, 6], [*long[:97], 1], long[1:50], [4, 5], long[:49], [*long[:48], 9], long[5:90]]
    with LLM(str(path), overrides=words.split()) as llm:
        outputs = [llm.generate([prompt], greedy)[0] for prompt in (long, long, prompts[1])]
        borders = [(len(prompt) - 1) // spacing * spacing for prompt in (long, long[:61])]
        assert [output.cached_tokens for output in outputs] == [0, *borders]
        llm.scheduler.cache_manager.reserve.mean_length = 0.0  # admit more than fit to their end
        outputs += llm.generate(prompts, greedy)
        stats = llm.scheduler.stats()
    Oracle(path).check_all([long, long, prompts[1], *prompts], [list(output.token_ids) for output in outputs])
    assert stats["retractions"] > 0
    assert sum(output.cached_tokens > 0 for output in outputs) > 4


@pytest.mark.parametrize("graph", ["simulated graph.max_tokens=64", "replay"])
def test_promise_8_with_recorded_steps(graph: str, dense: Path) -> None:
    """Recorded decode steps go on with each row's state, beside padding rows, loaded states and other prompts."""
    words = f"device=cpu cache=states page_size=1 num_pages=160 cache.spacing=8 max_running_requests=6 graph={graph}"
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[(7 * i * i + 3) % 320 for i in range(20)], [9], [4, 5, 6], [7] * 11, [8] * 13]
    with LLM(str(dense), overrides=words.split()) as llm:
        outputs = llm.generate(prompts, greedy) + llm.generate([*prompts[::-1], prompts[0]], greedy)
        runner: Any = llm.engine.graph  # type: ignore[attr-defined]
        assert runner.replays > 20
        assert runner.padded_rows > 0
    Oracle(dense).check_all([*prompts, *prompts[::-1], prompts[0]], [list(output.token_ids) for output in outputs])
    assert sum(output.cached_tokens > 0 for output in outputs) > 2


@pytest.mark.parametrize(("page_size", "num_pages", "spacing", "tp"), [(1, 300, 8, 1), (16, 22, 16, 2)])
def test_promise_8_with_drafts(page_size: int, num_pages: int, spacing: int, tp: int, path: Path) -> None:
    """Rejected drafts are taken back out of the states: cold and warm, with accepted drafts, and with retractions."""
    sizes = f"page_size={page_size} num_pages={num_pages} cache.spacing={spacing} tp={tp} cache.snapshots=6"
    words = f"device=cpu cache=states max_prefill_tokens=40 max_seq_len=160 max_running_requests=8 {sizes}"
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    long = [(7 * i * i + 3) % 40 for i in range(70)]
    prompts = [long, [*long[:50], 5, 6], [7] * 20, [4, 5, 4, 5, 4], long[:49], [1, 2, 3] * 9, [9], long[5:60]]
    with LLM(str(path), overrides=[*words.split(), "speculation=suffix", "speculation.match_tokens=1"]) as llm:
        outputs = [llm.generate([prompt], greedy)[0] for prompt in (long, long)]
        llm.scheduler.cache_manager.reserve.mean_length = 0.0  # admit more than fit to their end
        outputs += llm.generate(prompts, greedy)
        stats = llm.scheduler.stats()
    Oracle(path).check_all([long, long, *prompts], [list(output.token_ids) for output in outputs])
    assert stats["retractions"] > 0 and outputs[1].cached_tokens > 0
    assert 0 < stats["accepted_draft_tokens"] < stats["draft_tokens"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("speculation=grammar", "excludes speculation=grammar: use speculation=none, or one of ngram, suffix, lookup"),
        ("speculation=ngram graph=simulated", "excludes graph=simulated with speculation=ngram: use graph=none"),
        (
            "speculation=ngram verification_rounds=2",
            "excludes several rounds of verification: use verification_rounds=1",
        ),
        ("graph=simulated moe=torch", "can't record a step of 1 rows"),  # the experts' tokens are counted on the host
        ("cache=groups", "cache=groups: it knows no recurrent states"),
        ("cache.spacing=24 cache=states", "a multiple of page_size=16"),
        ("cache.snapshots=0 cache=states", "must be positive"),
        ("exact=true", "exact=true does not know the order of sums"),
    ],
)
def test_options_that_know_no_states(option: str, message: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), overrides=["device=cpu", "num_pages=64", *option.split()])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has no full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "only full_attention and linear_attention are known"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be a positive integer"),
        ({"linear_num_value_heads": 3}, "must be a multiple of 2 key heads"),
        ({"partial_rotary_factor": 0.1, "rope_parameters": {"rope_type": "default"}}, "can't be rotated in pairs"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str, path: Path, tmp_path: Path) -> None:
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), overrides=["device=cpu", "num_pages=64", "load_format=dummy"])


def test_saved_states_need_a_model_with_states() -> None:
    with pytest.raises(ConfigError, match="cache=states: it is for models with recurrent states"):
        LLM("tutor", overrides=["device=cpu", "num_pages=64", "cache=states"])


def test_tensors_of_multi_token_prediction_are_not_loaded(
    tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    save_file(
        tensors | {"mtp.fc.weight": torch.ones(4), "mtp.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors"
    )
    with caplog.at_level(logging.INFO):
        (got,) = PagedModel(tmp_path).run([(0, 0, [5, 6, 7])])
    assert "2 tensors of multi-token prediction (mtp) are not loaded" in caplog.text
    torch.testing.assert_close(got, PagedModel(path).run([(0, 0, [5, 6, 7])])[0])
