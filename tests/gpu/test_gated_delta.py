"""Linear attention with the gated delta rule: the Triton kernels compared with the plain torch layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from torch import Tensor, nn

from minisgl.attention import AttentionBackend, AttnBatch
from minisgl.distributed import Communicator
from minisgl.layers import Context
from minisgl.models.config import ModelConfig
from minisgl.plugins.kernels.converted.gated_delta import FastGatedDelta, convert_gated_delta
from minisgl.plugins.models.gated_delta import GatedDeltaNet, Pieces
from minisgl.plugins.models.qwen3_5 import SeparateProjections

HIDDEN, SLOTS = 32, 9
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
"""Of the relative error of a whole tensor."""


def make_layer(
    kind: type[GatedDeltaNet], sizes: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> GatedDeltaNet:
    """Return a layer with random weights and states. ``sizes``: key heads, value heads, dk, dv."""
    k_heads, v_heads, dk, dv = sizes
    raw = {
        "architectures": ["X"], "vocab_size": 8, "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": k_heads, "linear_num_value_heads": v_heads, "linear_key_head_dim": dk,
        "linear_value_head_dim": dv, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    ctx = Context(Communicator(), AttentionBackend(), generator.device, dtype)
    layer = kind(0, Pieces(), ModelConfig.from_dict(raw), ctx)
    for weight in layer.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, device=ctx.device).mul_(0.5).to(dtype)
    ctx.states = [
        torch.randn((SLOTS, *shape), generator=generator, device=ctx.device).to(kept)
        for shape, kept in layer.state_shapes()
    ]
    return layer


def set_step(layer: GatedDeltaNet, rows: Sequence[tuple[int, int, int]]) -> int:
    """Let the next step have ``rows``: (slot, tokens before, tokens of the step). Returns its number of tokens."""
    slots, before, lengths = np.array(rows, np.int32).T
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    totals = (before + lengths).astype(np.int32)
    device = layer.ctx.device
    on_device = [torch.from_numpy(array.copy()).to(device) for array in (bounds, totals, slots)]
    table = torch.zeros((SLOTS, 1), dtype=torch.int32, device=device)
    layer.ctx.batch = AttnBatch(int((lengths == 1).sum()), bounds, totals, *on_device, table)
    return int(bounds[-1])


@torch.inference_mode()
def compare(layer: GatedDeltaNet, x: Tensor) -> None:
    """Compute a step of x [tokens, hidden] with and without kernels: results and all states must be equal."""
    ctx, before = layer.ctx, [state.clone() for state in layer.ctx.states]
    expected = layer(x)
    states, ctx.states = ctx.states, before
    plain = type(layer)
    convert_gated_delta(nn.ModuleList([layer]))
    assert isinstance(layer, FastGatedDelta)
    got: Any = layer(x)
    layer.__class__ = plain
    for result, wanted in zip([got, *ctx.states], [expected, *states], strict=True):
        error = (result.double() - wanted.double()).norm() / wanted.double().norm()
        assert error.item() < TOLERANCE[x.dtype]


@pytest.mark.parametrize(
    ("kind", "sizes"), [(GatedDeltaNet, (2, 4, 24, 40)), (SeparateProjections, (1, 1, 16, 16))], ids=["next", "3.5"]
)
def test_decode_rows(
    kind: type[GatedDeltaNet],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    compiled: bool,
) -> None:
    """Rows go on with the states in their slots; a row that begins has none. Other slots stay as they are."""
    layer = make_layer(kind, (16, 32, 128, 128) if compiled else sizes, dtype, generator)
    tokens = set_step(layer, [(4, 7, 1), (1, 0, 1), (7, 100, 1)])
    compare(layer, torch.randn((tokens, HIDDEN), generator=generator, device=generator.device).to(dtype))


def test_prompts(dtype: torch.dtype, generator: torch.Generator, compiled: bool) -> None:
    """Prompts of any lengths, beside decode rows: some begin, and states are saved within and between chunks."""
    if not compiled and dtype == torch.float16:
        pytest.skip("tested in float32 only: the interpreter is slow")
    layer = make_layer(GatedDeltaNet, (16, 32, 128, 128) if compiled else (1, 2, 24, 40), dtype, generator)
    tokens = set_step(layer, [(4, 7, 1), (1, 0, 2), (7, 100, 67), (0, 0, 9), (2, 5, 3)])
    rows, positions, slots = [2, 3, 3, 4], [102, 2, 8, 8], [3, 5, 6, 8]
    layer.ctx.state_saves = tuple(np.array(column, np.int32) for column in (rows, positions, slots))  # type: ignore[assignment]
    compare(layer, torch.randn((tokens, HIDDEN), generator=generator, device=generator.device).to(dtype))
