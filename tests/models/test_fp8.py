"""Models in FP8: an FP8 checkpoint and a checkpoint that is quantised at load, compared with transformers.

The oracle is a transformers model in float64 whose projections multiply what the checkpoint's blocks stand for with
activations that are quantised here, group by group.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minisgl import LLM, SamplingParams
from minisgl.chapters.tutor.corpus import EXAMS, exam
from minisgl.chapters.tutor.score import is_right
from minisgl.config import Config, ConfigError
from minisgl.distributed import Communicator
from minisgl.layers.context import no_parts
from minisgl.models.config import ModelConfig
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.fp8_gemm.torch import TorchFp8Gemm
from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
from minisgl.plugins.models.dummy import Dummy
from minisgl.plugins.models.quantized import build_quantization
from minisgl.plugins.quantization.e4m3.experts import Fp8Experts
from minisgl.plugins.quantization.e4m3.matrix import Fp8Matrix
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

SHAPES: dict[str, dict[str, Any]] = {
    "aligned": {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 384},
    # Parts of 80 and 40 rows that can't be fused, and blocks of 72 columns at the right edges.
    "edges": {"hidden_size": 200, "head_dim": 20, "num_key_value_heads": 2, "intermediate_size": 328},
    "biases": {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "attention_bias": True},
}
MARGIN = 0.1
"""The top token must be the oracle's where its two best logits differ by more than this share of the logits' standard
deviation."""


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(5))


def read(raw: dict[str, Any], manager: PluginManager) -> object:
    """Let the engine's part for quantised weights read a config.json."""
    model, device = ModelConfig.from_dict(raw), torch.device("cpu")
    return build_quantization(Config(), manager, Path("config.json"), model, device, torch.float32, no_parts)


class QuantizedLinear(nn.Module):
    """The oracle's projection: rows of x are quantised in groups of 128, one group after another."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        groups = []
        for group in x.split(128, dim=-1):
            scale = group.abs().amax(-1, keepdim=True) / 448
            groups.append((group / scale).float().to(torch.float8_e4m3fn).double() * scale)
        return nn.functional.linear(torch.cat(groups, dim=-1), self.weight, self.bias)


class QuantizedExperts(nn.Module):
    """The oracle's experts: one token and one expert after another, with `QuantizedLinear`."""

    def __init__(self, gate_up: Tensor, down: Tensor):
        super().__init__()
        self.gate_up = [QuantizedLinear(weight, None) for weight in gate_up]
        self.down = [QuantizedLinear(weight, None) for weight in down]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token, (chosen, scales) in enumerate(zip(ids.tolist(), weights, strict=True)):
            for expert, scale in zip(chosen, scales, strict=True):
                gate, up = self.gate_up[expert](x[token, None]).chunk(2, dim=-1)
                out[token] += scale * self.down[expert](nn.functional.silu(gate) * up)[0]
        return out


def oracle_logits(path: Path, ids: Tensor) -> Tensor:
    """Return transformers' logits [len(ids), vocab], float64, of an FP8 checkpoint."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    del config.quantization_config
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    stored = load_file(path / "model.safetensors")
    wide = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        wide[name] = tensor.double()
        scales = stored.get(f"{name}_scale_inv", torch.empty(0, 0))
        for *expert, i, j in itertools.product(*map(range, scales.shape)):
            block = (*expert, slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            wide[name][block] *= scales[(*expert, i, j)].double()
    model.load_state_dict(_stacked(wide))
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            if hasattr(module, "experts"):
                module.experts = QuantizedExperts(module.experts.gate_up_proj, module.experts.down_proj)
            for name, child in list(module.named_children()):
                if name.endswith("_proj"):
                    setattr(module, name, QuantizedLinear(child.weight, child.bias))
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


def _stacked(wide: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts' matrices as transformers does: ``experts.gate_up_proj`` and ``experts.down_proj``."""
    parts: dict[str, list[Tensor]] = {}
    for name in sorted(wide, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        if found := re.fullmatch(r"(.*\.experts\.)\d+\.(\w+)_proj\.weight", name):
            parts.setdefault(f"{found[1]}{found[2]}_proj", []).append(wide.pop(name))
    stacks = {name: torch.stack(matrices) for name, matrices in parts.items()}
    for name in [name for name in stacks if name.endswith("gate_proj")]:
        both = stacks.pop(name), stacks.pop(name.replace("gate_proj", "up_proj"))
        stacks[name.replace("gate_proj", "gate_up_proj")] = torch.cat(both, dim=1)
    return wide | stacks


def logits(model: PagedModel, ids: Tensor) -> Tensor:
    """Return teacher-forced logits [len(ids), vocab]: two chunks of a prompt, then one token at a time."""
    half = len(ids) // 2
    steps = [model.run([(0, 0, ids[:9])]), model.run([(0, 9, ids[9:half])])]
    steps += [model.run([(0, at, ids[at : at + 1])]) for at in range(half, len(ids))]
    return torch.cat([rows[0] for rows in steps])


def agree(got: Tensor, expected: Tensor) -> None:
    """Check logits, and the top token wherever its margin exceeds `MARGIN`.

    Sums in another order differ in the last bit. Where that moves an activation to the next number of e4m3, the token
    and later ones differ by as much as quantisation itself changes them: a few percent. The logits of tokens before
    are equal but for rounding in float32.
    """
    errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max().item() < 0.1
    assert errors.min().item() < 1e-5
    best = expected.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > MARGIN * expected.std()
    assert clear.float().mean() > 0.5
    assert torch.equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])


def checkpoint(folder: Path, shape: str, **more: Any) -> Path:
    """Write an FP8 checkpoint of one of `SHAPES`."""
    return tiny_checkpoint("qwen3", folder, fp8=True, **{**SHAPES[shape], **more})


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_checkpoint(shape: str, tmp_path: Path, ids: Tensor, manager: PluginManager) -> None:
    path = checkpoint(tmp_path, shape)
    model = PagedModel(path, manager=manager)
    agree(logits(model, ids), oracle_logits(path, ids))
    stored = load_file(path / "model.safetensors")
    assert model.bytes_read == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_and_activations_quantise_for_the_product(
    shape: str, tmp_path: Path, ids: Tensor, manager: PluginManager
) -> None:
    """A product that takes quantised rows of several tokens gets them from norms and activations: the same numbers."""

    class TakesQuantized(TorchFp8Gemm):
        seen: ClassVar = Counter[tuple[bool, type]]()

        def takes_quantized(self, weight: Fp8Weight, rows: int) -> bool:
            return rows > 1

        def forward(self, weight: Fp8Weight, x: Tensor | QuantizedRows) -> Tensor:
            self.seen[len(x) > 1, type(x)] += 1
            return super().forward(weight, x)

    path = checkpoint(tmp_path, shape)
    expected = logits(PagedModel(path, manager=manager), ids)
    assert torch.equal(logits(PagedModel(path, fp8_gemm=TakesQuantized(), manager=manager), ids), expected)
    seen = TakesQuantized.seen
    assert seen[True, QuantizedRows] >= 3 * seen[True, Tensor] > 0  # only the output projection quantises its input
    assert seen[False, Tensor] > 0 == seen[False, QuantizedRows]


@pytest.mark.parametrize("tied", [False, True])
def test_quantised_at_load(tied: bool, tmp_path: Path, ids: Tensor, manager: PluginManager) -> None:
    """A wide checkpoint with the weights that an FP8 checkpoint stands for is quantised to the same FP8 weights."""
    path = checkpoint(tmp_path, "aligned", tie_word_embeddings=tied)
    expected = logits(PagedModel(path, manager=manager), ids)
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        scale, weight = stored.pop(name).float(), name.removesuffix("_scale_inv")
        stored[weight] = stored[weight].float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    model = PagedModel(path, quantize=True, manager=manager)
    agree(logits(model, ids), expected.double())
    dtypes = {name: p.dtype for name, p in model.model.named_parameters()}  # type: ignore[attr-defined]
    in_e4m3 = {name for name, dtype in dtypes.items() if dtype == torch.float8_e4m3fn}
    assert in_e4m3 >= {"layers.0.self_attn.qkv_proj.weight", "layers.1.mlp.down_proj.weight"}
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in in_e4m3)
    wide = logits(PagedModel(path, manager=manager), ids)  # without quantize=fp8, the same file is not quantised
    error = ((wide - expected).norm() / expected.norm()).item()
    assert 2e-3 < error < 0.1


@pytest.mark.parametrize(("size", "more"), [(2, {"num_key_value_heads": 4}), (2, {}), (4, {"num_key_value_heads": 1})])
def test_ranks_load_their_own_blocks(
    size: int, more: dict[str, Any], tmp_path: Path, ids: Tensor, manager: PluginManager
) -> None:
    """Ranks with slices of whole blocks compute what one rank computes, and read only their own scales."""
    shape = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 1024, "num_key_value_heads": 2, **more}
    path = tiny_checkpoint("qwen3", tmp_path, fp8=True, **shape)
    alone = PagedModel(path, manager=manager)
    expected = logits(alone, ids).double()

    def rank(comm: Communicator) -> tuple[Tensor, int]:
        model = PagedModel(path, comm=comm, manager=manager)
        return logits(model, ids), model.bytes_read

    for got, bytes_read in run_ranks(size, rank, manager):
        agree(got, expected)
        assert bytes_read < 0.75 * alone.bytes_read


def test_ranks_quantise_slices_of_any_size(tmp_path: Path, ids: Tensor, manager: PluginManager) -> None:
    """Blocks of a weight that is quantised at load begin at the rank's slice, so every slice can be quantised."""
    path = tiny_checkpoint("qwen3", tmp_path, **SHAPES["edges"])
    expected = logits(PagedModel(path, quantize=True, manager=manager), ids).double()
    for got in run_ranks(
        2, lambda comm: logits(PagedModel(path, quantize=True, comm=comm, manager=manager), ids), manager
    ):
        assert ((got - expected).norm() / expected.norm()).item() < 0.2  # other blocks, so other rounding


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (
            {"intermediate_size": 384, "num_key_value_heads": 4},
            r"slice 0 to 192 of the 384 rows of model.layers.0.mlp.gate_p",
        ),
        ({"head_dim": 32, "num_key_value_heads": 4}, r"slice 0 to 64 of the 128 rows of model.layers.0.self_attn.q_p"),
    ],
)
def test_a_slice_through_a_block_is_refused(
    more: dict[str, Any], name: str, tmp_path: Path, manager: PluginManager
) -> None:
    path = tiny_checkpoint("qwen3", tmp_path, fp8=True, **{"hidden_size": 256, "head_dim": 64, **more})

    def rank(comm: Communicator) -> str:
        with pytest.raises(ConfigError, match=name) as caught:
            PagedModel(path, comm=comm, manager=manager)
        return str(caught.value)

    assert "smaller tp" in run_ranks(2, lambda comm: rank(comm) if comm.rank == 0 else "", manager)[0]


def test_e4m3_without_scales_is_refused(tmp_path: Path, manager: PluginManager) -> None:
    path = checkpoint(tmp_path, "aligned")
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.1.mlp.down_proj.weight_scale_inv"]
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight_scale_inv"):
        PagedModel(path, manager=manager)


def test_stored_dtypes_must_fit_the_configuration(tmp_path: Path, manager: PluginManager) -> None:
    """Numbers are not silently converted to e4m3, nor is e4m3 read without its scales."""
    path = checkpoint(tmp_path, "aligned")
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**stored, name: stored[name].bfloat16()}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj.weight is stored in bfloat16, but .* implies float8_e4m3fn"):
        PagedModel(path, manager=manager)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    without = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    save_file(without, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"is stored in float8_e4m3fn, but .* implies a wider dtype"):
        PagedModel(path, manager=manager)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"also has .*weight_scale_inv"):
        PagedModel(path, manager=manager)


@pytest.mark.parametrize("stored", [False, True])
def test_dummy_weights(stored: bool, tmp_path: Path, ids: Tensor, manager: PluginManager) -> None:
    """Dummy weights in FP8 are the dummy weights of the wide model, quantised."""
    path = tiny_checkpoint("qwen3", tmp_path, fp8=stored, **SHAPES["aligned"])
    options: dict[str, Any] = {"source": Dummy(3), "manager": manager}
    got = logits(PagedModel(path, quantize=True, **options), ids)
    config = ModelConfig.from_dir(path)
    raw = {key: value for key, value in config.raw.items() if key != "quantization_config"}
    wide = PagedModel(ModelConfig(**{**vars(config), "raw": raw}), **options)
    error = (got - logits(wide, ids)).norm() / got.norm()
    assert 1e-3 < error.item() < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method='awq', but only 'fp8'"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"scale_fmt": "e5m2"}, "scale_fmt='e5m2'"),
        ({"activation_scheme": "none"}, "activation_scheme='none'"),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\], which is not two positive"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
    ],
)
def test_other_quantisation_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, manager: PluginManager
) -> None:
    path = checkpoint(tmp_path, "aligned")
    raw = json.loads((path / "config.json").read_text())
    assert read(raw, manager)
    raw["quantization_config"] |= change
    with pytest.raises(ConfigError, match=message):
        read(raw, manager)


EXPERTS: dict[str, Any] = {
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""Two ranks have whole blocks of every matrix."""


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(stacked: bool, tmp_path: Path, ids: Tensor, manager: PluginManager) -> None:
    """Experts are multiplied in FP8, on one rank and on two, stored one by one or stacked."""
    path = tiny_checkpoint("qwen3_moe", tmp_path, fp8=True, fused_experts=stacked, **EXPERTS)
    expected = oracle_logits(path, ids)
    for size in (1, 2):
        for got in run_ranks(size, lambda comm: logits(PagedModel(path, comm=comm, manager=manager), ids), manager):
            agree(got.double(), expected)
    layers = PagedModel(path, manager=manager).model.layers
    assert all(isinstance(layer.mlp, Fp8Experts) and isinstance(layer.mlp.experts.down, list) for layer in layers)


def test_experts_are_quantised_at_load(tmp_path: Path, ids: Tensor, manager: PluginManager) -> None:
    """Experts of a checkpoint in another dtype become those of the FP8 checkpoint; dummy ones are quantised too."""
    path = tiny_checkpoint("qwen3_moe", tmp_path / "wide", **EXPERTS)
    got = logits(PagedModel(path, quantize=True, manager=manager), ids)
    stored = tiny_checkpoint("qwen3_moe", tmp_path / "fp8", fp8=True, **EXPERTS)
    expected = logits(PagedModel(stored, manager=manager), ids)
    assert ((got - expected).norm() / expected.norm()).item() < 0.2  # its scales are rounded to bfloat16
    options: dict[str, Any] = {"source": Dummy(3), "manager": manager}
    dummy, wide = (logits(PagedModel(path, quantize=fp8, **options), ids) for fp8 in (True, False))
    assert 1e-4 < ((dummy - wide).norm() / wide.norm()).item() < 0.1


def test_experts_without_whole_blocks(tmp_path: Path, manager: PluginManager) -> None:
    """They can't be quantised at load. Those of an FP8 checkpoint are dequantised: see test_stored_fp8.py."""
    path = tiny_checkpoint("qwen3_moe", tmp_path, hidden_size=256, moe_intermediate_size=192)
    with pytest.raises(ConfigError, match=r"quantize=fp8: an expert's matrices of 192 × 256 .* whole blocks"):
        PagedModel(path, quantize=True, manager=manager)


def test_tutor_answers_as_well_in_fp8() -> None:
    """The share of right answers to held-out questions of all families differs by at most one percentage point.

    docs/design/fp8.md has the result with 200 questions of each family.
    """
    questions = [question for family in EXAMS for question in exam(family, 6)]
    chats = [list(question.messages) for question in questions]
    right = []
    for words in ([], ["quantize=fp8"]):
        with LLM("tutor", overrides=["device=cpu", *words]) as llm:
            assert llm.tokenizer is not None
            assert any(isinstance(module, Fp8Matrix) for module in llm.engine.model.modules()) == bool(words)
            lengths = [len(llm.tokenizer.encode(question.answer)) + 4 for question in questions]
            params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
            answers = [answer.text for answer in llm.chat(chats, params, progress=False)]
        right.append(sum(is_right(*pair) for pair in zip(questions, answers, strict=True)))
    assert right[0] > 0.9 * len(questions)
    assert abs(right[0] - right[1]) <= 0.01 * len(questions), right
