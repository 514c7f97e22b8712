"""The decoder layers with fused products, compared with the layers' own code; which steps they serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.layers import LinearRowParallel, RMSNormFused
from minisgl.models.converter import convert
from minisgl.models.decoder import DecoderLayer, DecoderLayers
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.kernels.converted import few_rows, fused_layers
from minisgl.plugins.kernels.converted.cpu_layers import CpuDecoderLayers
from minisgl.plugins.kernels.converted.decoder_layers import FusedDecoderLayers
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

pytest.importorskip("transformers", reason="transformers writes the checkpoints")

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "head_dim": 64},
    "qwen2": SIZES,  # biases, no QK-norm
}


class Served:
    """`fused_layers.serves` and its answers; on a CPU, under the interpreter, it does not ask for a GPU."""

    def __init__(self, compiled: bool):
        self.compiled, self.original = compiled, fused_layers.serves
        self.answers: list[bool] = []

    def __call__(self, layers: Any, x: Tensor) -> bool:
        served = self.original(layers, x)
        if not self.compiled:
            served = len(x) >= fused_layers.MIN_ROWS
        self.answers.append(served)
        return served


def build(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> PagedModel:
    """Build a tiny model with the Triton backend."""
    manager = PluginManager.load()
    attention = manager.build("attention", manager.make("attention", "triton"), device=device)
    path = tiny_checkpoint(name, folder, **MODELS[name])
    model = PagedModel(
        path, device=device, dtype=dtype, manager=manager, attention=attention, max_seq_len=96, max_running_requests=70
    )
    convert(model.model, dict.fromkeys((DecoderLayers, CpuDecoderLayers), FusedDecoderLayers))  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("name", list(MODELS))
def test_same_logits_as_the_layers(
    name: str, tmp_path: Path, device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows, rows of several tokens, and both together; each step reads the KV of those before."""
    if not compiled and name != "qwen2":
        pytest.skip("too slow for the interpreter")
    served = Served(compiled)
    monkeypatch.setattr(fused_layers, "serves", served)
    monkeypatch.setattr(few_rows, "MAX_ROWS", 0)
    count = 70 if compiled else 3
    ids = torch.randint(0, 320, (count, 90), generator=torch.Generator().manual_seed(5))
    logits: dict[bool, list[Tensor]] = {}
    for fused in (False, True):
        served.answers.clear()
        monkeypatch.setattr(fused_layers, "MIN_ROWS", 2 if fused else 1 << 30)
        model = build(name, tmp_path / str(fused), device, torch.bfloat16 if compiled else torch.float16)
        lengths = [4 + row % 20 for row in range(count)]
        model.run([(row, 0, ids[row, :2]) for row in range(count)])
        model.run([(row, 2, ids[row, 2:length]) for row, length in enumerate(lengths)])
        logits[fused] = []
        for step, rows in enumerate((count, 5 if compiled else 2, 2)):
            chosen = [(row, lengths[row] + step, ids[row, lengths[row] + step :][:1]) for row in range(rows)]
            logits[fused] += model.run(chosen)
        mixed = [(0, lengths[0] + 3, ids[0, lengths[0] + 3 :][:1]), (1, lengths[1] + 3, ids[1, lengths[1] + 3 :][:4])]
        logits[fused] += model.run(mixed)
        # On a GPU, the second step has more than 256 tokens.
        assert served.answers == [fused, fused and not compiled, fused, fused, fused, fused]
    got, want = (torch.cat(logits[fused]).double() for fused in (True, False))
    assert got.isfinite().all()
    assert (got - want).norm() / want.norm() < (2e-2 if compiled else 3e-3)


def test_which_layers_are_served(tmp_path: Path, device: torch.device, compiled: bool) -> None:
    """2 to 256 rows in half precision on a GPU, of `DecoderLayer` itself and of no subclass."""

    class Other(DecoderLayer):
        pass

    model: Any = build("qwen3", tmp_path, device, torch.bfloat16)
    layers = model.model.layers
    capable = compiled and torch.cuda.get_device_capability()[0] >= 9

    def serves(rows: int, x: Tensor | None = None) -> bool:
        given = torch.zeros(rows, 256, device=device, dtype=torch.bfloat16) if x is None else x
        return fused_layers.serves(layers, given)

    assert [serves(rows) for rows in (1, 2, 256, 257)] == [False, capable, capable, False]
    layers[1].__class__ = Other
    assert not serves(2)
    layers[1].__class__ = DecoderLayer
    assert not serves(2, x=torch.zeros(2, 256, device=device))
    assert not serves(2, x=torch.zeros(2, 256, dtype=torch.bfloat16))

    class OtherNorm(RMSNormFused):
        pass

    class OtherProjection(LinearRowParallel):
        pass

    # A module that a plugin replaced, in one layer, is enough.
    for module, other in (
        (layers[1].post_attention_layernorm, OtherNorm),
        (layers[1].mlp.down_proj, OtherProjection),
        (layers[1].self_attn.o_proj, OtherProjection),
    ):
        x, usual = torch.zeros(2, 256, device=device, dtype=torch.bfloat16), module.__class__
        assert fused_layers._serves_layer(layers[1], x)
        module.__class__ = other
        assert not fused_layers._serves_layer(layers[1], x)
        assert not serves(2)
        module.__class__ = usual
