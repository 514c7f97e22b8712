"""Checkpoints in FP8 of every layout, compared with transformers with the numbers that the layout means."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl import LLM, SamplingParams
from minisgl.config import Config, ConfigError
from minisgl.layers.context import no_parts
from minisgl.models.config import ModelConfig
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.quantized import build_quantization
from minisgl.plugins.quantization.e4m3.layers import Fp8Linear
from minisgl.plugins.quantization.e4m3.matrix import Fp8Matrix
from minisgl.plugins.quantization.e4m3.stored import dequantize_slice
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

IDS = torch.arange(40, 70)
E4M3 = torch.float8_e4m3fn
FILE = "model.safetensors"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


def read(raw: dict[str, Any], manager: PluginManager) -> object:
    """Let the engine's part for quantised weights read a config.json."""
    model, device = ModelConfig.from_dict(raw), torch.device("cpu")
    return build_quantization(Config(), manager, Path("config.json"), model, device, torch.float32, no_parts)


def edit(path: Path, quantization: dict[str, Any] | None, change: Change = dict) -> None:
    """Change the tensors of a checkpoint, and its ``quantization_config``; None removes that."""
    save_file({name: t.contiguous() for name, t in change(load_file(path / FILE)).items()}, path / FILE)
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))


def wide(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with those in e4m3 replaced by e4m3 · scale, element by element, in float32."""
    result = {}
    for name, tensor in stored.items():
        if "_scale" in name:
            continue
        result[name] = tensor.float()
        scale = stored.get(f"{name}_scale_inv", stored.get(f"{name}_scale"))
        if tensor.dtype != E4M3:
            continue
        assert scale is not None
        if scale.dim() < 2:
            scale = scale.view(-1, 1)
        for dim in (-1, -2):
            if scale.shape[dim] not in (1, tensor.shape[dim]):
                scale = scale.repeat_interleave(128, dim).narrow(dim, 0, tensor.shape[dim])
        result[name] *= scale.float()
    return result


def oracle(path: Path, folder: Path) -> Tensor:
    """Return transformers' logits [len(IDS), vocab], float32, of a checkpoint whose e4m3 tensors are dequantised."""
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(load_file(path / FILE), folder / FILE)
    edit(folder, None, wide)
    return Oracle(folder, "float32").logits(IDS)  # type: ignore[no-any-return]


def check(path: Path, manager: PluginManager, tmp_path: Path, *, ranks: tuple[int, ...] = (1,)) -> None:
    """Compare the logits with transformers' on one rank, and on each other number of ``ranks``."""
    expected = oracle(path, tmp_path / "wide")
    for size in ranks:
        for got in run_ranks(
            size, lambda comm: PagedModel(path, comm=comm, manager=manager).run([(0, 0, IDS)])[0], manager
        ):
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


# ---- experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(stacked: bool, tmp_path: Path, manager: PluginManager) -> None:
    """Experts of several blocks, also cut by the ranks inside of a block, stored one by one or stacked."""
    sizes = {"hidden_size": 160, "moe_intermediate_size": 288}
    path = tiny_checkpoint("qwen3_moe", tmp_path / "model", fp8=True, fused_experts=stacked, **sizes)
    stored = load_file(path / FILE)
    name = "experts.down_proj_scale_inv" if stacked else "experts.7.down_proj.weight_scale_inv"
    assert stored[f"model.layers.0.mlp.{name}"].shape[-2:] == (2, 3)
    check(path, manager, tmp_path, ranks=(1, 2))


def test_experts_are_reported_and_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_checkpoint("qwen3_moe", tmp_path / "model", fp8=True)
    with (
        caplog.at_level(logging.INFO, "minisgl"),
        LLM(str(path), overrides=["num_pages=20", "device=cpu"]) as llm,
    ):
        (output,) = llm.generate([IDS.tolist()], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    edit(path, None, wide)
    Oracle(path).check(IDS.tolist(), output.token_ids)
    (line,) = [record.getMessage() for record in caplog.records if "dequantised" in record.getMessage()]
    assert "GiB of weights in FP8 were dequantised to float32 on this rank (an expert's matrices of 48 × 64" in line


def test_experts_in_bfloat16(tmp_path: Path, manager: PluginManager) -> None:
    """The weights are those of transformers' dequantised checkpoint in bfloat16, bit for bit."""
    path = tiny_checkpoint("qwen3_moe", tmp_path, fp8=True, hidden_size=160)
    seen: dict[str, Tensor] = {}

    class Backend:
        def load(self, gate_up: Tensor, down: Tensor, *args: Any) -> None:
            seen.setdefault("gate_up", gate_up.clone())
            seen.setdefault("down", down.clone())

    PagedModel(path, dtype=torch.bfloat16, manager=manager, moe=Backend())  # type: ignore[arg-type]
    tensors = wide(load_file(path / FILE))
    for expert in range(8):
        parts = [
            tensors[f"model.layers.0.mlp.experts.{expert}.{n}_proj.weight"].bfloat16() for n in ("gate", "up", "down")
        ]
        assert torch.equal(seen["gate_up"][expert], torch.cat(parts[:2]))
        assert torch.equal(seen["down"][expert], parts[2])


# ---- some layers in 16 bits -------------------------------------------------------------------------------


def widen(*names: str) -> Change:
    """Return a change that stores the weights whose names contain one of ``names`` in bfloat16, without scales."""

    def change(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        chosen = {name for name in stored if any(part in name for part in names)}
        numbers = wide(stored)
        kept = {name: tensor for name, tensor in stored.items() if name not in chosen}
        return kept | {name: numbers[name].bfloat16() for name in chosen & numbers.keys()}

    return change


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "listed",
    [
        {"modules_to_not_convert": ["model.layers.0.mlp.down_proj", "lm_head"]},
        {"ignored_layers": ["model.layers.0.mlp.down_proj"]},
        {"modules_to_not_convert": ["layers.0.mlp.down_proj"]},
        {"ignored_layers": [r"re:.*\.0\.mlp\.down_proj"]},
        {"modules_to_not_convert": None},
    ],
)
def test_spellings_of_unconverted_modules(listed: dict[str, Any], tmp_path: Path, manager: PluginManager) -> None:
    """What a list names, and how, does not matter: the stored dtype of a layer says whether it is in FP8."""
    path = tiny_checkpoint("qwen3", tmp_path, fp8=True, hidden_size=128)
    expected = PagedModel(path, manager=manager).run([(0, 0, IDS)])[0]
    edit(path, {**FP8, **listed}, widen("layers.0.mlp.down_proj"))
    model = PagedModel(path, manager=manager)
    down = [layer.mlp.down_proj for layer in model.model.layers]  # type: ignore[attr-defined]
    assert [isinstance(layer, Fp8Linear) for layer in down] == [False, True]
    got = model.run([(0, 0, IDS)])[0]
    assert 1e-6 < ((got - expected).norm() / expected.norm()).item() < 0.1


@pytest.mark.parametrize("names", [("_proj",), ("q_proj", "up_proj", "down_proj", "o_proj")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_merged_layers(names: tuple[str, ...], ranks: int, tmp_path: Path, manager: PluginManager) -> None:
    """A merged layer with a part in 16 bits has 16 bits: its parts in FP8 are dequantised, and nothing is quantised."""
    path = tiny_checkpoint("qwen3", tmp_path / "model", fp8=True, hidden_size=192)
    edit(path, FP8, widen(*names))
    check(path, manager, tmp_path, ranks=(ranks,))
    modules = PagedModel(path, manager=manager).model.modules()  # type: ignore[attr-defined]
    assert not any(isinstance(module, Fp8Matrix) for module in modules)


def test_quantize_converts_the_rest(tmp_path: Path, manager: PluginManager) -> None:
    """With quantize=fp8, the parts in 16 bits are quantised, and those in FP8 are kept as they are."""
    path = tiny_checkpoint("qwen3", tmp_path, fp8=True, hidden_size=128)
    before = PagedModel(path, manager=manager).run([(0, 0, IDS)])[0]
    edit(path, FP8, widen("q_proj", "down_proj"))
    model = PagedModel(path, quantize=True, manager=manager)
    assert sum(isinstance(module, Fp8Matrix) for module in model.model.modules()) == 8  # type: ignore[attr-defined]
    assert ((model.run([(0, 0, IDS)])[0] - before).norm() / before.norm()).item() < 0.1


def test_head_and_embedding_in_fp8(tmp_path: Path, manager: PluginManager) -> None:
    path = tiny_checkpoint("qwen3_moe", tmp_path / "model", fp8=True)

    def change(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
            scale = stored[name].abs().max() / 448
            stored |= {name: (stored[name] / scale).to(E4M3), f"{name}_scale_inv": scale}
        return stored

    edit(path, FP8, change)
    check(path, manager, tmp_path)


# ---- other layouts ----------------------------------------------------------------------------------------


def requantize(kind: str, suffix: str, extra: bool = True) -> Change:
    """Return a change that stores the projections with one scale for each ``tensor`` or ``channel`` (row)."""

    def change(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        result = wide(stored)
        for name in [name for name, tensor in stored.items() if tensor.dtype == E4M3]:
            weight = result[name]
            rows = weight.abs().amax(-1, keepdim=True)
            scale = {
                "tensor": weight.abs().max(),
                "one": weight.abs().max().view(1),
                "channel": rows,
                "row": rows[:, 0],
            }
            factor = scale[kind] / 448
            values = weight / (factor.unsqueeze(-1) if kind == "row" else factor)
            result |= {name: values.clamp(-448, 448).to(E4M3), f"{name}{suffix}": factor}
            if extra:
                module = name.removesuffix(".weight")
                result |= {f"{module}.input_scale": torch.tensor(0.5), f"{module}.k_scale": torch.tensor(0.5)}
        return result

    return change


def groups(strategy: str, **more: Any) -> dict[str, Any]:
    """Return the ``quantization_config`` of compressed-tensors with FP8 weights."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("config", "kind", "suffix"),
    [
        (STATIC, "tensor", "_scale"),
        ({**STATIC, "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}, "one", "_scale"),
        ({**STATIC, "weight_block_size": None}, "tensor", "_scale_inv"),
        (groups("tensor"), "one", "_scale"),
        (groups("channel"), "channel", "_scale"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "row", "_scale"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor", "_scale"),
    ],
)
def test_scales_of_tensors_and_rows(
    architecture: str, config: dict[str, Any], kind: str, suffix: str, tmp_path: Path, manager: PluginManager
) -> None:
    path = tiny_checkpoint(architecture, tmp_path / "model", fp8=True)
    edit(path, config, requantize(kind, suffix))
    check(path, manager, tmp_path, ranks=(1, 2))


def test_scales_of_tensors_with_quantize(tmp_path: Path, manager: PluginManager) -> None:
    """quantize=fp8 stores the dequantised weights in blocks of 128 × 128."""
    path = tiny_checkpoint("qwen3", tmp_path / "model", fp8=True, hidden_size=128)
    edit(path, STATIC, requantize("tensor", "_scale"))
    expected = oracle(path, tmp_path / "wide")
    model = PagedModel(path, quantize=True, manager=manager)
    assert sum(isinstance(module, Fp8Matrix) for module in model.model.modules()) == 8  # type: ignore[attr-defined]
    error = ((model.run([(0, 0, IDS)])[0] - expected).norm() / expected.norm()).item()
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize(
    ("config", "suffix", "dtype"),
    [
        ({**FP8, "activation_scheme": "static"}, "_scale_inv", torch.bfloat16),
        ({**FP8, "scale_fmt": "ue8m0"}, "_scale_inv", torch.float8_e8m0fnu),
        (groups("block", block_structure=[128, 128]), "_scale", torch.float32),
    ],
)
def test_blocks_that_are_dequantised(
    config: dict[str, Any], suffix: str, dtype: torch.dtype, tmp_path: Path, manager: PluginManager
) -> None:
    path = tiny_checkpoint("qwen3", tmp_path / "model", fp8=True, hidden_size=200)

    def change(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = {name: name.replace("_scale_inv", suffix) for name in stored if name.endswith("_scale_inv")}
        return {scales.get(name, name): t.to(dtype) if name in scales else t for name, t in stored.items()}

    edit(path, config, change)
    check(path, manager, tmp_path, ranks=(1, 2))


def test_blocks_of_another_size() -> None:
    """Any cut of a weight gets the scales of its own blocks, also of edges, rows and stacks."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 10, 13, generator=generator).to(E4M3)
    scale = torch.rand(3, 3, 2, generator=generator)
    whole = values.float() * scale.repeat_interleave(4, 1)[:, :10].repeat_interleave(8, 2)[:, :, :13]
    for cut in ((slice(0, 3), slice(3, 9), slice(7, 13)), (slice(1, 2), slice(0, 10), slice(0, 13))):
        assert torch.equal(dequantize_slice(values[cut], scale, values.shape, cut, (4, 8)), whole[cut])
    for wrong in (torch.ones(3, 2, 2), torch.ones(3, 2), torch.ones(7), torch.ones(1, 3, 3, 2)):
        with pytest.raises(ValueError, match="do not fit a weight of shape"):
            dequantize_slice(values, wrong, values.shape, [slice(0, n) for n in values.shape], (4, 8))


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (groups("group"), "strategy='group'"),
        (groups("tensor", num_bits=4, type="int"), "type='int', num_bits=4"),
        (groups("tensor", symmetric=False), "symmetric=False"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "no config_groups"),
        ({**groups("tensor"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**groups("tensor"), "transform_config": {"config_groups": {"a": {}}}}, "transforms"),
        ({"quant_method": "gptq"}, "only 'fp8' is supported"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method='bitsandbytes', but only 'fp8'"),
        ("fp8", "must be a JSON object, got 'fp8'"),
    ],
)
def test_other_layouts_are_refused(config: Any, message: str, tmp_path: Path, manager: PluginManager) -> None:
    raw = json.loads((tiny_checkpoint("qwen3", tmp_path) / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        read({**raw, "quantization_config": config}, manager)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {n: t for n, t in s.items() if n != "NAME_scale_inv"}, "lacks NAME_scale_inv"),
        (
            lambda s: {**s, "NAME_scale_inv": torch.ones(5, 7)},
            r"NAME_scale_inv can't be read: scales of shape \[5, 7\]",
        ),
        (lambda s: {**s, "NAME_scale_inv": torch.ones(1, 1, dtype=torch.uint8)}, "stored in uint8, not as floats"),
        (lambda s: {**s, "NAME_scale": torch.ones(1)}, "also has NAME_scale"),
        (lambda s: {**s, "NAME": s["NAME"].bfloat16()}, "stored in bfloat16, but it has scales, NAME_scale_inv"),
        (lambda s: {**s, "other.weight_scale_inv": torch.ones(1)}, r"also has other\.weight_scale_inv"),
    ],
)
def test_tensors_that_do_not_fit(
    change: Change, message: str, tmp_path: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is of the expert whose name is written NAME."""
    path = tiny_checkpoint("qwen3_moe", tmp_path, fp8=True)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def renamed(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = change({n.replace(name, "NAME"): tensor for n, tensor in stored.items()})
        return {n.replace("NAME", name): tensor for n, tensor in changed.items()}

    edit(path, FP8, renamed)
    with pytest.raises(ConfigError, match=message.replace("NAME", name.replace(".", r"\."))):
        PagedModel(path, manager=manager)
