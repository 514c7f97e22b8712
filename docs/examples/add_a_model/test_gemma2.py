"""Gemma 2 against transformers, on a small random checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from gemma2 import Gemma2ForCausalLM
from torch import Tensor

from minisgl.testing.model import ModelConformance


class TestGemma2(ModelConformance):
    def make(self) -> type:
        return Gemma2ForCausalLM

    def checkpoint(self, folder: Path) -> Path:
        """Two layers, the first with a window of 9 positions. The caps are low, so a missing cap changes the logits."""
        config = transformers.Gemma2Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=24,
            max_position_embeddings=512,
            sliding_window=9,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        )
        model = transformers.Gemma2ForCausalLM(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * (0.2 if "norm" in name or "embed" in name else 1.5 / weight.shape[-1] ** 0.5))
        model.save_pretrained(folder)
        return folder

    def reference(self, path: Path, ids: Tensor) -> Tensor:
        """Compute logits eagerly in float64: transformers' SDPA path leaves out the cap of the attention scores."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        )
        with torch.inference_mode():
            return model(ids[None], use_cache=False).logits[0].float()
