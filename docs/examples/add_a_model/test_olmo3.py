"""OLMo 3 against transformers, on a small random checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from olmo3 import Olmo3ForCausalLM

from minisgl.testing.model import ModelConformance


class TestOlmo3(ModelConformance):
    ranks = (2, 4)  # with four ranks, each of the two KV heads is on two ranks

    def make(self) -> type:
        return Olmo3ForCausalLM

    def checkpoint(self, folder: Path) -> Path:
        """Three layers of both types, with different RoPE tables."""
        config = transformers.Olmo3Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            pad_token_id=0,
        )
        model = transformers.Olmo3ForCausalLM(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.2 * noise if "norm" in name else 1.5 * noise / weight.shape[-1] ** 0.5)
        model.save_pretrained(folder)
        return folder
