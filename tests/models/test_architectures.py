"""Every architecture compared with transformers on a random checkpoint: logits within 1e-4 in float32.

The logits must not depend on how the prompts are split into chunks, pages and batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-head-dim": ("llama", {"head_dim": 24, "num_key_value_heads": 4}),
    "llama-odd-vocabulary": ("llama", {"vocab_size": 323}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 21}),
    "qwen2": ("qwen2", {}),
    "qwen2-some-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-plain-weights": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3-moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3-moe-some-dense": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3-moe-stacked": ("qwen3_moe", {"fused_experts": True}),
    "smollm3": ("smollm3", {}),
    "smollm3-interval": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None, "no_rope_layer_interval": 3}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "mlp_bias": True}),
    "olmo3": ("olmo3", {}),
    "gpt-oss": ("gpt_oss", {}),
    "gemma3": ("gemma3", {}),
    "gemma3-untied": ("gemma3", {"tie_word_embeddings": False, "final_logit_softcapping": 5.0}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-dense": ("qwen3_next", {"mlp_only_layers": [0, 1], "full_attention_interval": 4, "head_dim": 24}),
    "olmo3-many-kv-heads": ("olmo3", {"num_key_value_heads": 4, "layer_types": None, "num_hidden_layers": 4}),
}
LENGTHS = (70, 33, 5)


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, list]:
    """Return a checkpoint, three sequences of token ids, and transformers' logits for them."""
    architecture, overrides = CASES[request.param]
    path = tiny_checkpoint(architecture, tmp_path_factory.mktemp(request.param), **overrides)
    reference = Oracle(path, "float32")
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 320, (n,), generator=generator) for n in LENGTHS]
    return path, ids, [reference.logits(sequence) for sequence in ids]


@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_match_transformers(case: tuple[Path, list, list], page_size: int, manager: PluginManager) -> None:
    """Run one prompt as a whole, a second in chunks while the first decodes, and a third that joins a mixed batch."""
    path, (a, b, c), (want_a, want_b, want_c) = case
    model = PagedModel(path, page_size=page_size, max_seq_len=96, max_running_requests=3, manager=manager)

    def check(got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)

    (got,) = model.run([(2, 0, a[:60])])  # a whole prompt
    check(got, want_a[:60])
    (got,) = model.run([(0, 0, b[:7])])  # a chunk that ends within a page
    check(got, want_b[:7])
    got_a, got_b = model.run([(2, 60, a[60:61]), (0, 7, b[7:30])])  # decode, and a chunk after a cached prefix
    check(got_a, want_a[60:61])
    check(got_b, want_b[7:30])
    got_a, got_c, got_b = model.run([(2, 61, a[61:62]), (1, 0, c[:1]), (0, 30, b[30:32])])
    check(got_a, want_a[61:62])
    check(got_c, want_c[:1])
    check(got_b, want_b[30:32])
    got_c, got_a, got_b = model.run([(1, 1, c[1:2]), (2, 62, a[62:63]), (0, 32, b[32:33])])  # all decode
    check(got_c, want_c[1:2])
    check(got_a, want_a[62:63])
    check(got_b, want_b[32:33])
    for i in range(63, 70):
        (got,) = model.run([(2, i, a[i : i + 1])])
        check(got, want_a[i : i + 1])


def test_bfloat16(tmp_path: Path, manager: PluginManager) -> None:
    """In bfloat16 the logits are as close to float32 as transformers' are: only activations are rounded."""
    path = tiny_checkpoint("qwen3", tmp_path)
    ids = torch.arange(3, 43)
    want = Oracle(path, "bfloat16").logits(ids).float()
    exact = Oracle(path).logits(ids).float()
    model = PagedModel(path, dtype=torch.bfloat16, max_seq_len=48, max_running_requests=1, manager=manager)
    (got,) = model.run([(0, 0, ids)])
    assert (got - exact).abs().mean() < 1.5 * (want - exact).abs().mean()
