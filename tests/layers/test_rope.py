"""RoPE with its kinds of scaling, compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.config import ConfigError
from minisgl.layers.attention import RoPE, RopeConfig, frequencies
from minisgl.models.config import ModelConfig
from minisgl.plugins.models.rope_scaling import ScaledRope

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "default-1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "llama3.2": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn-qwen": {**YARN, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-one": {**YARN, "factor": 1.0},
    "yarn-nulls": {**YARN, "beta_fast": None, "mscale": None, "attention_factor": None},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_table(name: str, head_dim: int) -> None:
    """The cosines and sines are those of transformers."""
    rope = CASES[name]
    length = 4096
    theirs = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=length, rope_parameters=dict(rope)
    )
    ours = ModelConfig.from_dict({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"], "rope_parameters": rope})
    positions = torch.tensor([0, 1, 2, 17, 511, 512, 1000, length - 1])
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.empty(0, dtype=torch.float32), positions[None])
    table = RoPE(ours.rope, head_dim, length, torch.device("cpu"))
    got = table(positions)
    assert got.dtype == torch.float32
    want = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    torch.testing.assert_close(
        frequencies(ours.rope, head_dim)[0], LlamaRotaryEmbedding(theirs).inv_freq, rtol=2e-6, atol=0
    )
    assert torch.equal(table(positions.int()), got)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    ],
)
def test_table_within_the_original_context(rope: dict[str, Any]) -> None:
    """Types whose angles depend on the length of the sequence equal transformers up to `ModelConfig.max_len`."""
    if rope["rope_type"] == "longrope":
        rope = {**rope, "short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters=dict(rope))
    ours = ModelConfig.from_dict({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"], "rope_parameters": rope})
    positions = torch.arange(ours.max_len)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.empty(0, dtype=torch.float32), positions[None])
    got = RoPE(ours.rope, 16, ours.max_len, torch.device("cpu"))(positions)
    torch.testing.assert_close(got, torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=-1), atol=2e-5, rtol=0)


def test_what_the_table_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope_type 'mrope' is not supported"):
        frequencies(RopeConfig(rope_type="mrope"), 64)
    with pytest.raises(ConfigError, match="short_factor of longrope has 3 numbers, expected 32"):
        frequencies(ScaledRope(rope_type="longrope", short_factor=(1.0, 1.0, 1.0)), 64)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5 is not supported"):
        frequencies(RopeConfig(partial_rotary_factor=0.5), 64)
    with pytest.raises(ConfigError, match="head_dim=15 is odd"):
        frequencies(RopeConfig(), 15)
