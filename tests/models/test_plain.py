"""A decoder layer in one function computes and stores the same as the engine's, in every layer of two models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.attention import AttentionBackend, LayerSpec
from minisgl.kvcache.pool import KVPool
from minisgl.layers.attention import frequencies
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import DecoderLayer
from minisgl.models.shipped import weights_dir
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}  # float32 rounding: the sums are taken in another order
PROMPTS = torch.randint(5, 300, (2, 40), generator=torch.Generator().manual_seed(3))


def plain_decoder_layer(
    weights: Mapping[str, Tensor],
    layer: LayerSpec,
    config: ModelConfig,
    x: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    pool: KVPool,
    attention: AttentionBackend,
) -> Tensor:
    """Compute one pre-norm decoder layer of Qwen3 or Llama type for the tokens of one step, in one function.

    A step's tokens come from several requests; they are concatenated, without padding. Only the attention backend
    distinguishes the requests: it must have been planned for the step (`AttentionBackend.plan`). This function stores
    the tokens' keys and values in ``pool``.

    Args:
        weights: The parameters of a `minisgl.models.decoder.DecoderLayer` at tensor-parallel size 1, by name, in the
            model's dtype.
        layer: The layer's number, head counts and head size; the attention backend also reads its scale and window.
        config: The model's configuration, of which RoPE parameters and ``rms_norm_eps`` are used.
        x: The residual stream [tokens, hidden], which is not changed.
        positions: Each token's position in its sequence [tokens].
        out_cache_loc: Each token's KV location [tokens]: page · page_size + offset within the page.
        pool: The KV pool of all layers.
        attention: The attention backend.

    Returns:
        The residual stream after the layer [tokens, hidden].
    """
    tokens, hidden = x.shape
    q_heads, kv_heads, head_dim = layer.q_heads, layer.kv_heads, layer.head_dim
    eps = config.rms_norm_eps

    # ---- attention ----
    # Norm before the projection (pre-norm). One matrix holds the query, key and value projections.
    h = F.rms_norm(x, (hidden,), weights["input_layernorm.weight"], eps)
    qkv = F.linear(h, weights["self_attn.qkv_proj.weight"], weights.get("self_attn.qkv_proj.bias"))
    # qkv: [tokens, (q_heads + 2·kv_heads)·head_dim]
    q, k, v = qkv.split([q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    q = q.reshape(tokens, q_heads, head_dim)  # [tokens, q_heads·head_dim] → [tokens, q_heads, head_dim]
    k = k.reshape(tokens, kv_heads, head_dim)  # [tokens, kv_heads·head_dim] → [tokens, kv_heads, head_dim]
    v = v.reshape(tokens, kv_heads, head_dim)  # as for k

    # QK-norm: RMSNorm of each query and key head. Qwen3 has it, Llama does not.
    if "self_attn.q_norm.weight" in weights:
        q = F.rms_norm(q, (head_dim,), weights["self_attn.q_norm.weight"], eps)
        k = F.rms_norm(k, (head_dim,), weights["self_attn.k_norm.weight"], eps)

    # RoPE: rotate each pair of dimensions (i, i + head_dim/2) by an angle proportional to the token's position.
    inv_freq, rope_scale = frequencies(config.rope, head_dim)  # [head_dim/2], radians per position
    angles = positions.float()[:, None] * inv_freq.to(x.device)  # [tokens, head_dim/2]
    cos = (angles.cos() * rope_scale)[:, None, :]  # [tokens, 1, head_dim/2]: the same for all heads
    sin = (angles.sin() * rope_scale)[:, None, :]
    q1, q2 = q.float().chunk(2, dim=-1)  # each [tokens, q_heads, head_dim/2]
    k1, k2 = k.float().chunk(2, dim=-1)  # each [tokens, kv_heads, head_dim/2]
    q = torch.cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), dim=-1).to(x.dtype)  # [tokens, q_heads, head_dim]
    k = torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin), dim=-1).to(x.dtype)  # [tokens, kv_heads, head_dim]

    # Store keys and values in the pages of the requests, then attend: each query reads the KV of its own request at its
    # own and all earlier positions (within the layer's window, if it has one), also those that were stored in earlier
    # steps.
    pool.store(layer.index, k, v, out_cache_loc)
    attended = attention.forward(layer, q, torch.empty_like(q))  # [tokens, q_heads, head_dim]

    # Output projection, added to the residual stream.
    attended = attended.reshape(tokens, q_heads * head_dim)  # [tokens, q_heads, head_dim] → [tokens, q_heads·head_dim]
    x = x + F.linear(attended, weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))

    # ---- MLP ----
    # Gated: down(silu(gate(h)) · up(h)). One matrix holds the gate and up projections.
    h = F.rms_norm(x, (hidden,), weights["post_attention_layernorm.weight"], eps)
    gate_up = F.linear(h, weights["mlp.gate_up_proj.weight"], weights.get("mlp.gate_up_proj.bias"))
    gate, up = gate_up.chunk(2, dim=-1)  # [tokens, 2·intermediate] → two of [tokens, intermediate]
    return x + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"], weights.get("mlp.down_proj.bias"))


class Comparison:
    """Hooks on a model's decoder layers that run the plain layer after each of them, on the same inputs.

    ``positions`` must hold the positions of the step's tokens before the step runs. ``compared`` lists the numbers of
    the layers that were compared so far.
    """

    def __init__(self, model: PagedModel):
        self.model = model
        self.positions = torch.empty(0)
        self.compared: list[int] = []
        self._stream: Tensor | None = None
        for module in model.model.modules():  # type: ignore[attr-defined]
            if isinstance(module, DecoderLayer):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep a copy of the residual stream: the engine's layer may overwrite its input."""
        x, residual = args[:2]
        self._stream = x.clone() if residual is None else x + residual

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Run the plain layer on an emptied KV location of each token; compare residual stream, keys and values."""
        assert isinstance(module, DecoderLayer)
        assert self._stream is not None
        spec, pool, out_cache_loc = module.self_attn.spec, self.model.pool, args[3]
        at = (out_cache_loc // pool.page_size, out_cache_loc % pool.page_size)
        stored = [buffer[at].clone() for buffer in pool.layer(spec.index)]  # keys, values
        for buffer in pool.layer(spec.index):
            buffer[at] = float("nan")
        got = plain_decoder_layer(
            dict(module.named_parameters()),
            spec,
            self.model.config,
            self._stream,
            self.positions,
            out_cache_loc,
            pool,
            self.model.attention,
        )
        torch.testing.assert_close(got, output[0] + output[1], **CLOSE)
        for buffer, want in zip(pool.layer(spec.index), stored, strict=True):
            torch.testing.assert_close(buffer[at], want, **CLOSE)
        self.compared.append(spec.index)


def check(path: Path) -> None:
    """Compare all layers in a prefill step of two requests, a step that mixes decode and prefill, and a decode step."""
    model = PagedModel(path, page_size=4, max_seq_len=48)
    comparison = Comparison(model)
    a, b = PROMPTS
    comparison.positions = torch.cat((torch.arange(30), torch.arange(17)))
    model.run([(0, 0, a[:30]), (1, 0, b[:17])])
    comparison.positions = torch.cat((torch.tensor([30]), torch.arange(17, 26)))
    model.run([(0, 30, a[30:31]), (1, 17, b[17:26])])
    comparison.positions = torch.tensor([31, 26])
    model.run([(0, 31, a[31:32]), (1, 26, b[26:27])])
    assert comparison.compared == [*range(model.config.num_hidden_layers)] * 3


def test_tutor() -> None:
    """Qwen3 with the weights that ship: QK-norm, no biases."""
    check(weights_dir("tutor"))


@pytest.mark.parametrize("biases", [False, True])
def test_llama(biases: bool, tmp_path: Path) -> None:
    """No QK-norm, with and without biases in all projections."""
    check(tiny_checkpoint("llama", tmp_path, attention_bias=biases, mlp_bias=biases))
