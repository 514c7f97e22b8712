"""The same model cut over ranks (threads, linked by gloo) computes what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.models.weights import Dummy
from minisgl.plugin_manager.manager import PluginManager
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
    return PluginManager.load()


def drive(model: PagedModel, ids: torch.Tensor) -> torch.Tensor:
    """A chunk, a chunk behind it, and a decode step."""
    steps = [model.run([(0, 0, ids[:9])]), model.run([(0, 9, ids[9:19])]), model.run([(0, 19, ids[19:20])])]
    return torch.cat([rows[0] for rows in steps])


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_one_rank(name: str, tmp_path: Path, manager: PluginManager) -> None:
    size, architecture, overrides = CASES[name]
    path = tiny_checkpoint(architecture, tmp_path, **overrides)
    vocab = overrides.get("vocab_size", 320)
    ids = torch.randint(0, vocab, (20,), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"max_len": 20, "slots": 2, "page_size": 4, "manager": manager}
    alone = PagedModel(path, **options)

    def rank(comm: Communicator) -> tuple[torch.Tensor, int]:
        model = PagedModel(path, comm=comm, **options)
        return drive(model, ids), model.bytes_read

    want = drive(alone, ids)
    for got, bytes_read in run_ranks(size, rank, manager):
        assert got.shape == (20, vocab)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert bytes_read < alone.bytes_read


def test_dummy_weights_are_the_same_model_on_any_number_of_ranks(tmp_path: Path, manager: PluginManager) -> None:
    path = tiny_checkpoint("qwen3_moe", tmp_path)
    ids = torch.arange(5, 25)
    options: dict[str, Any] = {"max_len": 20, "slots": 1, "source": Dummy(seed=7), "manager": manager}
    want = drive(PagedModel(path, **options), ids)
    assert want.std() > 0
    for got in run_ranks(2, lambda comm: drive(PagedModel(path, comm=comm, **options), ids), manager):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    other = drive(PagedModel(path, **{**options, "source": Dummy(seed=8)}), ids)
    assert (other - want).abs().max() > 10 * (got - want).abs().max()


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (3, {}, r"tp=3 does not divide the model's query heads \(4\)"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}, "tp=2 can't share 3 kv heads"),
        (2, {"intermediate_size": 97}, r"tp=2 does not divide the model's gate_proj rows \(97\)"),
    ],
)
def test_a_model_that_the_ranks_do_not_divide_is_refused(
    size: int, overrides: dict[str, Any], message: str, tmp_path: Path, manager: PluginManager
) -> None:
    path = tiny_checkpoint("mistral", tmp_path, **overrides)
    with pytest.raises(ConfigError, match=message):
        run_ranks(size, lambda comm: PagedModel(path, comm=comm, manager=manager), manager)
