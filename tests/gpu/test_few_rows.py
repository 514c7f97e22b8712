"""The decoder layers for a few decode rows, compared with the layers' own code; which steps they serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.models.converter import convert
from minisgl.models.decoder import DecoderLayer, DecoderLayers
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.triton import FUSED_ROWS, TritonAttention
from minisgl.plugins.kernels.converted import few_rows
from minisgl.plugins.kernels.converted.cpu_layers import CpuDecoderLayers
from minisgl.plugins.kernels.converted.decoder_layers import FusedDecoderLayers
from minisgl.plugins.kernels.ops.launch import in_pieces, recording
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

pytest.importorskip("transformers", reason="transformers writes the checkpoints")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen2": {"hidden_size": 64, "intermediate_size": 96},  # biases, no QK-norm
    "qwen3_moe": {**SIZES, "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


class Served:
    """`few_rows.serves` and its answers; on a CPU, under the interpreter, it does not ask for a GPU."""

    def __init__(self, compiled: bool):
        self.compiled, self.original = compiled, few_rows.serves
        self.answers: list[bool] = []

    def __call__(self, layers: Any, x: Tensor) -> bool:
        served = self.original(layers, x)
        if not self.compiled and len(x) <= few_rows.MAX_ROWS and not in_pieces():
            served = few_rows.fuses(layers[0], x)
        self.answers.append(served)
        return served


@pytest.fixture
def served(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Replace `few_rows.serves` by a `Served`."""
    made = Served(compiled)
    monkeypatch.setattr(few_rows, "serves", made)
    return made


def build(name: str, folder: Path, device: torch.device, compiled: bool, backend: str = "triton") -> PagedModel:
    """Build a tiny model with the Triton backends: in bfloat16 on a GPU, in float32 under the interpreter."""
    manager = PluginManager.load()
    kinds = {"attention": backend, "moe": "triton"}
    made = {kind: manager.build(kind, manager.make(kind, name), device=device) for kind, name in kinds.items()}
    dtype = torch.bfloat16 if compiled else torch.float32
    path = tiny_checkpoint(name, folder, **MODELS[name])
    model = PagedModel(path, device=device, dtype=dtype, manager=manager, max_seq_len=96, **made)
    if not compiled:
        convert(model.model, dict.fromkeys((DecoderLayers, CpuDecoderLayers), FusedDecoderLayers))  # type: ignore[arg-type]
        if isinstance(model.attention, TritonAttention):  # the interpreter needs no early launches
            model.attention.fused_rows = FUSED_ROWS
    return model


@pytest.mark.parametrize("name", list(MODELS))
def test_same_logits_as_the_layers(
    name: str, tmp_path: Path, device: torch.device, compiled: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows decode for three steps after prompts of different lengths; each step reads the KV of those before."""
    if not compiled and name != "qwen3_moe":
        pytest.skip("too slow for the interpreter")
    logits: dict[int, list[Tensor]] = {}
    ids = torch.randint(0, 320, (3, 90), generator=torch.Generator().manual_seed(5))
    for max_rows in (0, 4):
        monkeypatch.setattr(few_rows, "MAX_ROWS", max_rows)
        served.answers.clear()
        model = build(name, tmp_path / str(max_rows), device, compiled)
        lengths = [5, 20, 70] if compiled else [3, 9]
        model.run([(row, 0, ids[row, :length]) for row, length in enumerate(lengths)])
        logits[max_rows] = []
        for step in range(3):
            rows = [
                (row, length + step, ids[row, length + step : length + step + 1]) for row, length in enumerate(lengths)
            ]
            logits[max_rows] += model.run(rows[: 3 - step])
        assert served.answers == [False] + [max_rows > 0] * 3
    got, want = (torch.cat(logits[n]).double() for n in (4, 0))
    assert got.isfinite().all()
    assert (got - want).norm() / want.norm() < (2e-2 if compiled else 1e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_layers_own_code_also_fuses_attention(
    name: str, tmp_path: Path, device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `few_rows` can't compute whole layers, their attention is still one call, for at most four decode rows."""
    if not compiled and name != "qwen2":
        pytest.skip("too slow for the interpreter")
    original = TritonAttention.fuses
    monkeypatch.setattr(few_rows, "MAX_ROWS", 0)
    logits: dict[bool, list[Tensor]] = {}
    ids = torch.randint(0, 320, (5, 90), generator=torch.Generator().manual_seed(6))
    for fused in (False, True):
        answers: list[bool] = []

        def fuses(
            backend: TritonAttention, layer: Any, x: Tensor, fused: bool = fused, answers: list[bool] = answers
        ) -> bool:
            answers.append(original(backend, layer, x))
            return answers[-1] and fused

        monkeypatch.setattr(TritonAttention, "fuses", fuses)
        model = build(name, tmp_path / str(fused), device, compiled)
        lengths = [5, 20, 70, 11, 2] if compiled else [3, 9]
        model.run([(row, 0, ids[row, :length]) for row, length in enumerate(lengths)])
        assert not any(answers)
        logits[fused] = []
        for step, count in enumerate((len(lengths), 2, 1)):
            answers.clear()
            rows = [(row, n + step, ids[row, n + step : n + step + 1]) for row, n in enumerate(lengths)]
            logits[fused] += model.run(rows[:count])
            assert answers == [count <= FUSED_ROWS] * len(answers) != []
    got, want = (torch.cat(logits[fused]).double() for fused in (True, False))
    assert got.isfinite().all()
    assert (got - want).norm() / want.norm() < (2e-2 if compiled else 1e-5)


def test_which_steps_are_served(
    tmp_path: Path, device: torch.device, compiled: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only steps whose rows all decode, of at most `MAX_ROWS` rows, that are not recorded in pieces."""
    monkeypatch.setattr(few_rows, "MAX_ROWS", 2)
    model = build("qwen3", tmp_path, device, compiled)
    model.run([(row, 0, [row + 7, 9]) for row in range(3)])
    model.run([(0, 2, [4])])
    model.run([(0, 3, [4]), (1, 2, [5])])
    model.run([(0, 4, [4]), (1, 3, [5]), (2, 2, [6])])
    model.run([(0, 5, [4]), (1, 4, [5, 6])])
    model.run([(2, 3, [5, 6])])
    with recording(None, lambda function, args, kwargs: function(*args, **kwargs)):
        model.run([(0, 6, [4])])
    assert served.answers == [False, True, True, False, False, False, False]


def test_float32_and_other_layers_are_not_served(tmp_path: Path, device: torch.device, compiled: bool) -> None:
    """The layers' own code computes float32, x on a CPU, and layers of a subclass or of another class."""

    class Other(DecoderLayer):
        pass

    model: Any = build("qwen3", tmp_path, device, compiled)
    model.run([(0, 0, [1, 2, 3])])
    model.run([(0, 3, [4])])  # plans a decode step
    layers, x = model.model.layers, torch.zeros(1, 64, device=device, dtype=torch.bfloat16)
    assert few_rows.serves(layers, x) == (compiled and torch.cuda.get_device_capability()[0] >= 9)
    assert not few_rows.serves(layers, x.float())
    assert not few_rows.serves(layers, x.cpu())
    assert not few_rows.serves(layers, x.expand(few_rows.MAX_ROWS + 1, -1))
    layers[1].__class__ = Other
    assert not few_rows.serves(layers, x)
