"""`AttentionLayer.attend` is the place where a subclass changes attention, on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.layers import AttentionLayer
from minisgl.plugins.attention.torch import TorchAttention
from minisgl.plugins.models.llama import LlamaForCausalLM
from minisgl.plugins.quantization.e4m3.layers import Fp8RowParallel
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel


class Doubled(AttentionLayer):
    """Attention with doubled queries, keys and values."""

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        return super().attend(2 * qkv, cos_sin, out_cache_loc)


class DoubledLlama(LlamaForCausalLM):
    def attention(self, index: int, **options: Any) -> AttentionLayer:
        c = self.config
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return Doubled(index, c.hidden_size, *heads, self.ctx, **options)


def test_attend_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that quantises its result for an FP8 projection replaces `attend`, but not that of a subclass."""
    asked: list[int] = []
    monkeypatch.setattr(Fp8RowParallel, "takes_quantized", lambda self, rows: self.weight.shape == (64, 64))
    monkeypatch.setattr(
        TorchAttention, "attend_quantized", lambda backend, layer, *_: asked.append(layer.index), raising=False
    )
    path, ids = tiny_checkpoint("llama", tmp_path), torch.arange(5, 15)
    (plain,) = PagedModel(path, quantize=True).run([(0, 0, ids)])
    (doubled,) = PagedModel(path, model=DoubledLlama, quantize=True).run([(0, 0, ids)])
    assert asked == [0, 1]  # the layers of the plain model
    assert not torch.equal(plain, doubled)
