"""Phi-4-mini against transformers, on a small random checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from phi3 import Phi3ForCausalLM

from minisgl.testing.model import ModelConformance


class TestPhi3(ModelConformance):
    def make(self) -> type:
        return Phi3ForCausalLM

    def checkpoint(self, folder: Path) -> Path:
        """Heads of 16 dimensions, of which RoPE rotates 12, and a window of 9 positions."""
        factors = [1 + i / 4 for i in range(6)]
        config = transformers.Phi3Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            original_max_position_embeddings=128,
            sliding_window=9,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": factors,
                "long_factor": [2 * factor for factor in factors],
            },
            pad_token_id=0,
        )
        model = transformers.Phi3ForCausalLM(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.2 * noise if "norm" in name else 1.5 * noise / weight.shape[-1] ** 0.5)
        model.save_pretrained(folder)
        return folder
