"""A model split over ranks (threads that communicate through gloo) computes the same as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.dummy import Dummy
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama-biases": (2, "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-vocabulary": (2, "llama", {"vocab_size": 323}),
    "llama-odd-tied-vocabulary": (2, "llama", {"vocab_size": 321, "tie_word_embeddings": True}),
    "llama-empty-last-rank": (4, "llama", {"vocab_size": 9, "eos_token_id": None, "num_key_value_heads": 4}),
    "mistral-window": (2, "mistral", {"sliding_window": 11}),
    "qwen2": (2, "qwen2", {}),
    "qwen3-one-kv-head": (2, "qwen3", {"num_key_value_heads": 1}),
    "qwen3-two-kv-heads-four-ranks": (4, "qwen3", {}),
    "qwen3-moe": (2, "qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3-moe-stacked": (2, "qwen3_moe", {"fused_experts": True}),
}


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


def logits(model: PagedModel, ids: torch.Tensor) -> torch.Tensor:
    """Compute the logits of 20 tokens in two prefill chunks and a decode step."""
    steps = [model.run([(0, 0, ids[:9])]), model.run([(0, 9, ids[9:19])]), model.run([(0, 19, ids[19:20])])]
    return torch.cat([rows[0] for rows in steps])


@pytest.mark.parametrize("name", CASES)
def test_ranks_match_one_rank(name: str, tmp_path: Path, manager: PluginManager) -> None:
    size, architecture, overrides = CASES[name]
    path = tiny_checkpoint(architecture, tmp_path, **overrides)
    vocab = overrides.get("vocab_size", 320)
    ids = torch.randint(0, vocab, (20,), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"max_seq_len": 20, "max_running_requests": 2, "page_size": 4, "manager": manager}
    alone = PagedModel(path, **options)

    def rank(comm: Communicator) -> tuple[torch.Tensor, int]:
        model = PagedModel(path, comm=comm, **options)
        return logits(model, ids), model.bytes_read

    want = logits(alone, ids)
    for got, bytes_read in run_ranks(size, rank, manager):
        assert got.shape == (20, vocab)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert bytes_read < alone.bytes_read


def test_dummy_weights(tmp_path: Path, manager: PluginManager) -> None:
    """Dummy weights are the same model on one and two ranks; another seed is another model."""
    path = tiny_checkpoint("qwen3_moe", tmp_path)
    ids = torch.arange(5, 25)
    options: dict[str, Any] = {
        "max_seq_len": 20,
        "max_running_requests": 1,
        "source": Dummy(seed=7),
        "manager": manager,
    }
    want = logits(PagedModel(path, **options), ids)
    assert want.std() > 0
    for got in run_ranks(2, lambda comm: logits(PagedModel(path, comm=comm, **options), ids), manager):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    other = logits(PagedModel(path, **{**options, "source": Dummy(seed=8)}), ids)
    assert (other - want).abs().max() > 10 * (got - want).abs().max()


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (3, {}, r"tp=3 does not divide the model's query heads \(4\)"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}, "tp=2 can't share 3 kv heads"),
        (2, {"intermediate_size": 97}, r"tp=2 does not divide the model's gate_proj rows \(97\)"),
    ],
)
def test_indivisible_models_are_refused(
    size: int, overrides: dict[str, Any], message: str, tmp_path: Path, manager: PluginManager
) -> None:
    path = tiny_checkpoint("mistral", tmp_path, **overrides)
    with pytest.raises(ConfigError, match=message):
        run_ranks(size, lambda comm: PagedModel(path, comm=comm, manager=manager), manager)
