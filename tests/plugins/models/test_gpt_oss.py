"""gpt-oss: chunks, pages and ranks; the experts as a graph computes them; backends that compute no sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM
from minisgl.config import ConfigError
from minisgl.plugins.models.gpt_oss import GptOssForCausalLM
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.model import ModelConformance


class TestGptOss(ModelConformance):
    architecture = "gpt_oss"

    def make(self) -> type:
        """Return the model class to test."""
        return GptOssForCausalLM

    def test_all_experts(self) -> None:
        """What a graph records, where every expert computes all tokens, is what the chosen experts compute."""
        moe: Any = self.model().model.layers[0].mlp  # type: ignore[attr-defined]
        x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
        ids, scale = moe.router(x)
        chosen = moe.experts(x, ids, scale)
        assert chosen.abs().max() > 0.1
        torch.testing.assert_close(moe.experts.forward_all(x, ids, scale, torch.zeros_like(x)), chosen)


@pytest.mark.parametrize("attention", ["paged", "hybrid attention.prefill=torch attention.decode=paged"])
def test_a_backend_without_sinks_is_refused(attention: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("gpt_oss", tmp_path)
    words = f"device=cpu num_pages=64 attention={attention}".split()
    with pytest.raises(ConfigError, match=r"have attention sinks.*use attention=torch"):
        LLM(str(path), overrides=words)
