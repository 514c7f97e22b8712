"""The FP8 products on a GPU, compared with products in float64 of the same quantised numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from minisgl import LLM, SamplingParams
from minisgl.attention import GraphKey, LayerSpec
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.triton import TritonAttention
from minisgl.plugins.fp8_gemm import triton as triton_gemm
from minisgl.plugins.graph.simulated import SimulatedRunner
from minisgl.plugins.kernels.ops import fp8
from minisgl.plugins.kernels.ops.triton import activation as triton_activation
from minisgl.plugins.kernels.ops.triton import fp8 as triton_fp8
from minisgl.plugins.kernels.ops.triton import norm as triton_norm
from minisgl.plugins.kernels.ops.triton import quantize
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

SHAPES = [(128, 128), (200, 400), (72, 96), (384, 1040)]
"""Shapes [out, in] of weights, with smaller blocks at the edges."""


def weight_of(out: int, inner: int, generator: torch.Generator) -> fp8.Fp8Weight:
    """Return a random weight whose blocks have scales of different magnitudes."""
    device = generator.device
    wide = torch.randn((out, inner), generator=generator, device=device) * inner**-0.5
    wide *= torch.rand((out, 1), generator=generator, device=device) + 0.1
    weight = fp8.Fp8Weight(
        torch.empty((out, inner), dtype=fp8.E4M3, device=device),
        torch.empty((fp8.blocks(out), fp8.blocks(inner)), device=device),
    )
    fp8.quantize_weight(wide, weight)
    return weight


def rows_of(rows: int, inner: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random rows that are not contiguous, with one group of zeros and one large element."""
    x = torch.randn((rows, 2 * inner), generator=generator, device=generator.device)[:, :inner]
    x[0, : fp8.BLOCK], x[-1, -1] = 0.0, 30.0
    return x.to(dtype)


def error(y: Tensor, expected: Tensor) -> float:
    """Return the relative error of the whole tensor, in the Frobenius norm."""
    return ((y.double() - expected).norm() / expected.norm()).item()


def exact(x: Tensor, weight: fp8.Fp8Weight, quantized: bool) -> Tensor:
    """Return the product in float64 of x, quantised or not, with the weight."""
    a = x.double()
    if quantized:
        rows = fp8.quantize_rows(x)
        a = rows.values.double() * rows.factors.double().repeat_interleave(fp8.BLOCK, 1)[:, : x.shape[1]]
    return a @ fp8.dequantize(weight).double().T


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative error: that of rounding the result to ``dtype``, or of sums in float32."""
    return {torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


@pytest.fixture(params=[8, 4, 2], ids=["8 rows a program", "4 rows a program", "2 rows a program"])
def one_row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Return `triton_fp8.one_row` whose programs have that many rows of a weight, whatever its number of outputs."""

    def product(x: Tensor, weight: fp8.Fp8Weight, act: str | None = None) -> Tensor:
        out = len(weight.values)
        monkeypatch.setattr(triton_fp8, "MANY_OUTPUTS", out if request.param == 8 else out + 1)
        monkeypatch.setattr(triton_fp8, "ONE_WAVE", out if request.param == 4 else out - 1)
        return triton_fp8.one_row(x, weight, act)

    return product


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_one_row(
    out: int,
    inner: int,
    generator: torch.Generator,
    one_row: Callable[..., Tensor],
    compiled: bool,
    request: pytest.FixtureRequest,
) -> None:
    if not compiled and inner > 1000 and "8 rows" not in request.node.callspec.id:
        pytest.skip("too slow for the interpreter")
    x, weight = rows_of(1, inner, torch.bfloat16, generator), weight_of(out, inner, generator)
    assert triton_fp8.serves_one_row(x, weight)
    assert error(one_row(x, weight), exact(x, weight, False)) < tolerance(torch.bfloat16)


@pytest.mark.parametrize(("out", "inner", "act"), [(256, 128, "gelu_tanh"), (512, 1040, "silu")])
def test_one_row_gated(
    out: int,
    inner: int,
    act: str,
    generator: torch.Generator,
    one_row: Callable[..., Tensor],
    compiled: bool,
    request: pytest.FixtureRequest,
) -> None:
    """One launch computes gate, up and the activation of their product."""
    if not compiled and inner > 1000 and "8 rows" not in request.node.callspec.id:
        pytest.skip("too slow for the interpreter")
    x, weight = rows_of(1, inner, torch.bfloat16, generator), weight_of(out, inner, generator)
    gate, up = exact(x, weight, False).chunk(2, dim=1)
    expected = F.silu(gate) * up if act == "silu" else F.gelu(gate, approximate="tanh") * up
    y = one_row(x, weight, act)
    assert y.shape == (1, out // 2)
    assert error(y, expected) < tolerance(torch.bfloat16)


def test_one_row_has_every_number(generator: torch.Generator) -> None:
    """All finite numbers of e4m3, also subnormal ones and zeros of both signs, are converted exactly."""
    numbers = torch.arange(256, device=generator.device).to(torch.uint8)
    numbers = numbers[numbers & 127 != 127]  # 254 numbers; the other two are NaN
    values = torch.zeros((256, 256), dtype=torch.uint8, device=generator.device)
    values[torch.arange(254), torch.arange(254)] = numbers
    weight = fp8.Fp8Weight(values.view(fp8.E4M3), torch.ones((2, 2), device=generator.device))
    x = torch.ones((1, 256), dtype=torch.bfloat16, device=generator.device)
    assert torch.equal(triton_fp8.one_row(x, weight)[0].float(), weight.values.float().sum(1))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_few_rows(rows: int, out: int, inner: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight = rows_of(rows, inner, dtype, generator), weight_of(out, inner, generator)
    assert error(triton_fp8.few_rows(x, weight), exact(x, weight, False)) < tolerance(dtype)


@pytest.mark.parametrize(("rows", "inner"), [(1, 128), (3, 400), (2, 2000)])
def test_quantize_rows(rows: int, inner: int, dtype: torch.dtype, generator: torch.Generator, compiled: bool) -> None:
    """Equal to the torch reference, bit for bit."""
    x = rows_of(rows, inner, dtype, generator)
    assert_same(quantize.quantize_rows(x), fp8.quantize_rows(x), compiled)


@pytest.mark.parametrize(("rows", "dim"), [(1, 128), (3, 400), (6, 2000), (2, 72)])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_quantizes(
    rows: int, dim: int, residual: bool, dtype: torch.dtype, generator: torch.Generator, compiled: bool
) -> None:
    """One launch has the result of two: the norm, and the quantisation of its rounded result."""
    x, weight = rows_of(rows, dim, dtype, generator), rows_of(1, dim, dtype, generator)[0]
    other = rows_of(rows, dim, dtype, generator) if residual else None
    if other is None:
        normed, total = triton_norm.rms_norm(x.clone(), weight, 1e-6), x
    else:
        normed, total = triton_norm.add_rms_norm(x.clone(), other, weight, 1e-6)
    quantized, stored = triton_norm.rms_norm_quantized(x.clone(), other, weight, 1e-6)
    assert torch.equal(stored, total)
    assert_same(quantized, fp8.quantize_rows(normed), compiled)


@pytest.mark.parametrize(("rows", "dim"), [(1, 128), (3, 400), (5, 2000), (2, 72)])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_activation_quantizes(
    rows: int, dim: int, act: str, dtype: torch.dtype, generator: torch.Generator, compiled: bool
) -> None:
    """One launch has the result of two: the activation, and the quantisation of its rounded result."""
    x = rows_of(rows, 2 * dim, dtype, generator)
    gelu = triton_activation.gelu_and_mul
    expected = triton_activation.silu_and_mul(x) if act == "silu" else gelu(x, approximate="tanh")
    assert_same(triton_activation.act_and_mul_quantized(x, act), fp8.quantize_rows(expected), compiled)


def assert_same(rows: fp8.QuantizedRows, expected: fp8.QuantizedRows, compiled: bool) -> None:
    """Check that both have the same numbers, and factors in the layout that TMA requires."""
    assert rows.dtype == expected.dtype
    assert rows.factors.stride() == expected.factors.stride() == (1, -(-len(rows) // 4) * 4)
    assert torch.equal(rows.factors, expected.factors)
    bits, expected_bits = rows.values.view(torch.uint8).int(), expected.values.view(torch.uint8).int()
    if compiled:
        assert torch.equal(bits, expected_bits)
        return
    # The interpreter rounds halves up, and loses a carry: numbers rounded up to a power of two become half of it. It
    # also rounds subnormal numbers, whose exponent bits are 0, by more than one step.
    assert (bits == expected_bits).float().mean() > 0.9
    assert ((bits - expected_bits).abs() <= 1)[(expected_bits & 7 != 0) & (expected_bits & 0x78 != 0)].all()


@pytest.mark.parametrize("rows", [1, 33, 130])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_many_rows(
    rows: int, out: int, inner: int, dtype: torch.dtype, generator: torch.Generator, compiled: bool
) -> None:
    x, weight = rows_of(rows, inner, dtype, generator), weight_of(out, inner, generator)
    y = triton_fp8.product(fp8.quantize_rows(x), weight)
    assert error(y, exact(x, weight, True)) < max(tolerance(dtype), 1e-3)
    if compiled:
        assert torch.equal(triton_fp8.many_rows(x, weight), y)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 300])
@pytest.mark.parametrize("name", ["triton", "flashinfer", "auto"])
def test_backends(name: str, rows: int, device: torch.device, generator: torch.Generator, compiled: bool) -> None:
    """Every backend multiplies any number of rows: with rows quantised as the reference does, or as they are."""
    if name == "flashinfer":
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")
    if not compiled and rows > 64:
        pytest.skip("too large for the interpreter")
    dtype = torch.bfloat16 if compiled else torch.float16
    manager = PluginManager.load()
    gemm = manager.build("fp8_gemm", manager.make("fp8_gemm", name), device=device)
    x, weight = rows_of(rows, 512, dtype, generator), weight_of(256, 512, generator)
    assert gemm.refuse(weight, dtype) == ""
    loaded = gemm.load(weight, dtype)
    y = gemm.forward(loaded, x)
    assert y.dtype == dtype
    assert y.shape == (rows, 256)
    if gemm.takes_quantized(loaded, rows):
        again = gemm.forward(loaded, fp8.quantize_rows(x))
        assert again.dtype == dtype
        assert error(again, exact(x, weight, True)) < (2 * tolerance(dtype) if compiled else 0.1)
    else:
        assert name != "flashinfer"
    wide, quantized = error(y, exact(x, weight, False)), error(y, exact(x, weight, True))
    # The interpreter's conversion to e4m3 is not exact: see test_quantize_rows.
    assert min(wide, quantized) < (2 * tolerance(dtype) if compiled else 0.1)


def test_auto_serves_every_shape(device: torch.device, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Sizes that a library refuses are multiplied by another backend."""
    manager = PluginManager.load()
    gemm = manager.build("fp8_gemm", manager.make("fp8_gemm", "auto"), device=device)
    for out, inner in ((72, 96), (33, 40)):
        x, weight = rows_of(20, inner, dtype, generator), weight_of(out, inner, generator)
        y = gemm.forward(gemm.load(weight, dtype), x)
        assert error(y, exact(x, weight, True)) < 2e-2


def test_model_agrees_with_the_reference(device: torch.device, compiled: bool, tmp_path: Path) -> None:
    """Teacher-forced logits of an FP8 model in bfloat16 on a GPU, compared with float32 on the CPU."""
    if not compiled:
        pytest.skip("tests/models/test_fp8.py compares the CPU with transformers")
    shape = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 1024}
    path = tiny_checkpoint("qwen3", tmp_path, fp8=True, **shape)
    manager = PluginManager.load()
    ids = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(3))
    gemm = manager.build("fp8_gemm", manager.make("fp8_gemm", "auto"), device=device)
    on_gpu = PagedModel(path, fp8_gemm=gemm, device=device, dtype=torch.bfloat16, manager=manager)
    on_cpu = PagedModel(path, manager=manager)
    logits = []
    for model in (on_gpu, on_cpu):
        steps = [model.run([(0, 0, ids[:40])])] + [model.run([(0, at, ids[at : at + 1])]) for at in range(40, 60)]
        logits.append(torch.cat([rows[0].cpu().double() for rows in steps]))
    got, expected = logits
    errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max().item() < 0.12
    best = expected.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 0.3 * expected.std()
    assert clear.float().mean() > 0.4
    assert torch.equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_attention_quantizes_for_the_output_projection(
    device: torch.device, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge of attention's parts quantises its result, and the log-probabilities are those of two launches."""
    monkeypatch.setattr(triton_gemm, "FEW_ROWS", 4)  # five rows are quantised
    shape = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 256}
    path = tiny_checkpoint("qwen3", tmp_path, fp8=True, **shape)
    words = ["attention=triton", "fp8_gemm=triton", f"device={device.type}", "num_pages=200", "max_running_requests=8"]
    words += ["attention.programs_per_sm=64"]  # rows are split also under the interpreter
    words += ["dtype=bfloat16", "graph=cuda"] if compiled else ["dtype=float32", "graph=simulated", "graph.max_rows=8"]
    calls: list[int] = []
    forward, quantizing = TritonAttention._forward_quantized, TritonAttention._quantizes

    def counted(self: TritonAttention, layer: LayerSpec, q: Tensor, out: fp8.QuantizedRows) -> None:
        calls.append(len(q))
        forward(self, layer, q, out)

    monkeypatch.setattr(TritonAttention, "_forward_quantized", counted)
    if not compiled:
        monkeypatch.setattr(SimulatedRunner, "buckets", lambda runner, max_rows: [GraphKey(8)])
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2)
    outputs = []
    for quantizes in (True, False):
        monkeypatch.setattr(TritonAttention, "_quantizes", quantizing if quantizes else lambda *args: False)
        # Under the interpreter, recording takes most of the time: only the size of these steps is recorded, and the
        # expected answers are computed without graphs.
        without_graph = ["graph=none"] if not compiled and not quantizes else []
        options = [word for word in words if not (without_graph and word.startswith("graph"))] + without_graph
        with LLM(str(path), overrides=options) as llm:
            answers = llm.generate([[3 + i, *range(20, 24 + 3 * i)] for i in range(6)], params)
        outputs.append([(answer.token_ids, answer.logprobs) for answer in answers])
        assert bool(calls) == quantizes
        assert all(rows > 4 for rows in calls)
        calls.clear()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_dequantised_weights(architecture: str, compiled: bool, tmp_path: Path) -> None:
    """Weights that are dequantised while they are loaded are the same on a GPU as on a CPU."""
    if not compiled:
        pytest.skip("compares a GPU with the CPU")
    path = tiny_checkpoint(architecture, tmp_path, fp8=True, hidden_size=160)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"  # also dequantises a dense model
    (path / "config.json").write_text(json.dumps(config))
    manager = PluginManager.load()
    on_cpu, on_gpu = (PagedModel(path, device=device, manager=manager).model for device in ("cpu", "cuda"))
    weights = dict(on_gpu.named_parameters())  # type: ignore[attr-defined]
    for name, weight in on_cpu.named_parameters():  # type: ignore[attr-defined]
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[name].cpu()), name


def test_layers_in_16_bits_beside_fp8(compiled: bool, tmp_path: Path) -> None:
    if not compiled:
        pytest.skip("tests/models/test_fp8.py does the same on a CPU")
    path = tiny_checkpoint("qwen3", tmp_path, fp8=True, hidden_size=128, num_hidden_layers=3)
    stored = load_file(path / "model.safetensors")
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        weight = fp8.Fp8Weight(stored[name], stored.pop(f"{name}_scale_inv").float())
        stored[name] = fp8.dequantize(weight).bfloat16()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    prompt = list(range(20, 60))
    expected = PagedModel(path).run([(0, 0, prompt)])[0][-1].log_softmax(-1)
    with LLM(str(path), overrides=["device=cuda", "dtype=bfloat16", "num_pages=64"]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)
        outputs = llm.generate([prompt] * 3, params)
    for output in outputs:
        assert output.logprobs is not None
        assert abs(output.logprobs[0].chosen - expected.max().item()) < 0.3
