"""``moe=triton`` compared with ``moe=torch`` in float64, for many numbers of experts, choices and tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minisgl.attention import AttentionBackend
from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.layers import Context
from minisgl.plugins.kernels.ops.fp8 import E4M3, Fp8Weight, quantize_rows, quantize_weight
from minisgl.plugins.models.gpt_oss import Experts as GptOssExperts
from minisgl.plugins.moe.torch import TorchMoe
from minisgl.plugins.moe.triton import TritonMoe
from minisgl.plugins.quantization.mx.fp4 import Mxfp4Checkpoint

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def expected(weights: tuple[Tensor, Tensor], experts: range, act: str, x: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
    """Compute the experts with ``moe=torch`` in float64."""
    wide = [w.cpu().double() for w in weights]
    backend, x = TorchMoe(), x.cpu().double()
    loaded = backend.load(*wide, experts, act)
    return backend.forward(loaded, x, ids.cpu(), scale.cpu().double(), torch.empty_like(x))


def check(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: torch.dtype, generator: torch.Generator,
    act: str = "silu", here: range | None = None, ids: Tensor | None = None,
) -> None:  # fmt: skip
    """Compare the Triton backend with the torch backend on random tokens; ``here`` are this rank's experts."""
    device, here = generator.device, here or range(experts)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5).to(dtype)

    x = random(tokens, hidden) * hidden**0.5
    weights = (random(len(here), 2 * inner, hidden), random(len(here), hidden, inner))
    if ids is None:
        ids = torch.rand(tokens, experts, generator=generator, device=device).topk(top_k).indices.int()
    scale = torch.rand(tokens, top_k, generator=generator, device=device) + 0.1
    backend = TritonMoe(device)
    out = torch.full_like(x, float("nan"))
    assert backend.forward(backend.load(*weights, here, act), x, ids, scale, out) is out
    reference = expected(weights, here, act, x, ids, scale)
    assert ((out.cpu().double() - reference).norm() / reference.norm()).item() < TOLERANCE[dtype]
    assert (out.cpu().double() - reference).abs().max() < 10 * TOLERANCE[dtype] * reference.abs().max()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 1, 1), (1, 2, 8), (9, 2, 8), (5, 3, 7), (20, 4, 60), (3, 8, 128)]
)
def test_numbers_of_experts_choices_and_tokens(
    tokens: int, top_k: int, experts: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> None:
    check(tokens, top_k, experts, 64, 32, dtype, generator)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "here"),
    [(1, 1, 1, None), (9, 2, 8, None), (40, 3, 5, None), (12, 2, 8, range(2, 5))],
)
def test_experts_in_fp8(
    tokens: int, top_k: int, experts: int, here: range | None,
    generator: torch.Generator, device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Compared with the torch backend on the same e4m3 numbers, whose products quantise the rows too."""
    dtype, here = torch.bfloat16 if compiled else torch.float16, here or range(experts)
    hidden, inner = 256, 128

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5).to(dtype)

    def quantised(weight: Tensor) -> Fp8Weight:
        values = torch.empty(weight.shape, dtype=E4M3, device=device)
        scales = torch.empty((len(weight), *(size // 128 for size in weight.shape[1:])), device=device)
        for parts in zip(weight, values, scales, strict=True):
            quantize_weight(parts[0], Fp8Weight(*parts[1:]))
        return Fp8Weight(values, scales)

    x = random(tokens, hidden) * hidden**0.5
    weights = quantised(random(len(here), 2 * inner, hidden)), quantised(random(len(here), hidden, inner))
    ids = torch.rand(tokens, experts, generator=generator, device=device).topk(top_k).indices.int()
    scale = torch.rand(tokens, top_k, generator=generator, device=device) + 0.1
    backend, reference = TritonMoe(device), TorchMoe()
    if not compiled:  # the interpreter's conversion to e4m3 is not exact: see test_fp8.py
        monkeypatch.setattr(backend.fp8_kernels, "quantize_rows", quantize_rows)
    out = backend.forward(backend.load_fp8(*weights, here, "silu"), x, ids, scale, torch.full_like(x, float("nan")))
    loaded = reference.load_fp8(*weights, here, "silu")
    expected = reference.forward(loaded, x.float(), ids, scale, torch.empty_like(x, dtype=torch.float32))
    # Sums of gate and up in another order, or in 16 bits, move some inner numbers to the next number of e4m3.
    assert ((out.float() - expected).norm() / expected.norm()).item() < (0.02 if compiled else 0.1)


@pytest.mark.parametrize(("hidden", "inner"), [(48, 40), (130, 66), (16, 16)])
def test_sizes(hidden: int, inner: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    check(6, 2, 4, hidden, inner, dtype, generator)


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
def test_other_activations(act: str, generator: torch.Generator, device: torch.device) -> None:
    check(6, 2, 4, 32, 32, torch.float32, generator, act=act)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "inner", "here"),
    [(9, 2, 8, 64, 32, None), (40, 3, 5, 72, 40, None), (3, 8, 128, 136, 16, None), (12, 2, 8, 64, 64, range(2, 5))],
)
def test_kernels_that_load_by_tma(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, here: range | None,
    generator: torch.Generator, device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The products for Hopper, with tiles that reach over the ends of both products."""
    from minisgl.plugins.kernels.ops.triton import moe_tma

    calls = []
    if compiled and torch.cuda.get_device_properties(device).major != 9:
        pytest.skip("needs a Hopper GPU")
    if not compiled:
        monkeypatch.setattr(moe_tma, "serves", lambda *tensors: True)
    up = moe_tma.up
    monkeypatch.setattr(moe_tma, "up", lambda *args: calls.append(args) or up(*args))
    dtype = torch.bfloat16 if compiled else torch.float16
    check(tokens, top_k, experts, hidden, inner, dtype, generator, here=here)
    assert len(calls) == 1


@pytest.mark.parametrize(("tma", "hidden", "inner"), [(False, 48, 40), (True, 72, 40), (True, 64, 64)])
def test_experts_with_biases_and_clamped_gates(
    tma: bool, hidden: int, inner: int, generator: torch.Generator, device: torch.device, compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The experts of gpt-oss, as the model's own code computes them in float64."""
    from minisgl.plugins.kernels.ops.triton import moe_tma

    if compiled and torch.cuda.get_device_properties(device).major != 9:
        pytest.skip("needs a Hopper GPU")
    if not compiled or not tma:
        monkeypatch.setattr(moe_tma, "serves", lambda *tensors: tma)
    dtype = torch.bfloat16 if compiled else torch.float16
    made = []
    for backend, where, kind in ((TritonMoe(device), device, dtype), (TorchMoe(), torch.device("cpu"), torch.float64)):
        ctx = Context(Communicator(), AttentionBackend(), where, kind, lambda _, backend=backend: backend)
        made.append(GptOssExperts(hidden, inner, 5, 1.702, 1.5, ctx))
    for weight, wide in zip(made[0].parameters(), made[1].parameters(), strict=True):
        weight.data = torch.randn(weight.shape, generator=generator, device=device).to(dtype) * 0.3
        wide.data = weight.data.cpu().double()
    x = torch.randn(11, hidden, generator=generator, device=device).to(dtype)
    ids = torch.rand(11, 5, generator=generator, device=device).topk(3).indices
    scale = torch.rand(11, 3, generator=generator, device=device) + 0.1
    with torch.inference_mode():
        for experts in made:
            experts.after_load()
        assert made[0].loaded is not None
        assert made[1].loaded is None
        out = made[0](x, ids, scale)
        reference = made[1](x.cpu().double(), ids.cpu(), scale.cpu().double())
    assert ((out.cpu().double() - reference).norm() / reference.norm()).item() < TOLERANCE[dtype]


@pytest.mark.parametrize(("hidden", "inner", "size"), [(128, 64, 1), (64, 192, 2), (160, 96, 1)])
def test_experts_in_mxfp4(
    hidden: int, inner: int, size: int, generator: torch.Generator, device: torch.device, compiled: bool, tmp_path: Path
) -> None:
    """The experts of gpt-oss in MXFP4, the sum of ``size`` ranks, compared with the dequantised ones in float64."""
    dtype, stored = torch.bfloat16 if compiled else torch.float16, {}
    cpu = torch.Generator().manual_seed(5)
    for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        shape = (5, rows, columns // 32)
        stored[f"experts.{name}_proj_blocks"] = torch.randint(0, 256, (*shape, 16), generator=cpu, dtype=torch.uint8)
        stored[f"experts.{name}_proj_scales"] = torch.randint(120, 125, shape, generator=cpu, dtype=torch.uint8)
        stored[f"experts.{name}_proj_bias"] = torch.randn(5, rows, generator=cpu).to(dtype)
    save_file(stored, tmp_path / "model.safetensors")

    def load(backend: Any, where: torch.device, kind: torch.dtype, rank: int, size: int, packed: bool) -> GptOssExperts:
        comm = SimpleNamespace(rank=rank, size=size)
        ctx = Context(comm, AttentionBackend(), where, kind, lambda _: backend)  # type: ignore[arg-type]
        experts = GptOssExperts(hidden, inner, 5, 1.702, 7.0, ctx)
        assert not packed or experts.keep_mxfp4()
        with Mxfp4Checkpoint(tmp_path, packed) as source, torch.no_grad():
            for shard in experts.weight_shards("experts.", source.names):
                shard.load(source)
        experts.after_load()
        return experts

    x = torch.randn(11, hidden, generator=generator, device=device).to(dtype)
    ids = torch.rand(11, 5, generator=generator, device=device).topk(3).indices
    scale = torch.rand(11, 3, generator=generator, device=device) + 0.1
    wide = load(TorchMoe(), torch.device("cpu"), torch.float64, 0, 1, False)
    with torch.inference_mode():
        parts = [load(TritonMoe(device), device, dtype, rank, size, True)(x, ids, scale) for rank in range(size)]
        reference = wide(x.cpu().double(), ids.cpu(), scale.cpu().double())
    out = sum(part.cpu().double() for part in parts)
    assert ((out - reference).norm() / reference.norm()).item() < TOLERANCE[dtype]


def test_mxfp4_needs_whole_groups(device: torch.device) -> None:
    """Two ranks of 96 inner columns have half of a group each: they keep the dequantised weights."""
    comm: Any = SimpleNamespace(rank=0, size=2)
    ctx = Context(comm, AttentionBackend(), device, torch.float16, lambda _: TritonMoe(device))
    assert not GptOssExperts(64, 96, 2, 1.702, 7.0, ctx).keep_mxfp4()


@pytest.mark.parametrize("programs", [1, 3])
def test_persistent_programs(
    programs: int, generator: torch.Generator, device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program of the second product computes several tiles; the last blocks of pairs have no expert."""
    from minisgl.plugins.kernels.ops.triton import moe_tma

    if compiled and torch.cuda.get_device_properties(device).major != 9:
        pytest.skip("needs a Hopper GPU")
    if not compiled:
        monkeypatch.setattr(moe_tma, "serves", lambda *tensors: True)
    monkeypatch.setattr(moe_tma, "MIN_PERSISTENT_M", 0)
    monkeypatch.setattr(moe_tma, "multiprocessors", lambda device: programs)
    dtype = torch.bfloat16 if compiled else torch.float16
    check(30, 3, 5, 136, 40, dtype, generator)
    check(12, 2, 8, 64, 64, dtype, generator, here=range(2, 5))


def test_all_tokens_to_one_expert(dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    ids = torch.full((40, 1), 3, dtype=torch.int32, device=device)
    check(40, 1, 6, 32, 32, dtype, generator, ids=ids)


def test_experts_of_other_ranks(generator: torch.Generator, device: torch.device) -> None:
    """Tokens without any expert on this rank get rows of zeros, not uninitialised memory."""
    ids = torch.tensor([[0, 1], [2, 5], [7, 3], [4, 6], [6, 7]], dtype=torch.int32, device=device)
    check(5, 2, 8, 32, 32, torch.float32, generator, here=range(2, 5), ids=ids)


@pytest.mark.parametrize("tokens", [1, 64, 700, 4096])
def test_large_sizes(tokens: int, generator: torch.Generator, device: torch.device, compiled: bool) -> None:
    if not compiled:
        pytest.skip("too large for the interpreter")
    check(tokens, 8, 128, 512, 256, torch.bfloat16, generator)


def test_no_device_synchronisation(generator: torch.Generator, device: torch.device, compiled: bool) -> None:
    """``forward`` does not make the host wait for the device."""
    if not compiled:
        pytest.skip("needs a CUDA device: on a CPU there is no device to wait for")
    check(33, 2, 8, 64, 64, torch.bfloat16, generator)
    backend = TritonMoe(device)
    weights = backend.load(
        torch.zeros(8, 128, 64, dtype=torch.bfloat16, device=device),
        torch.zeros(8, 64, 64, dtype=torch.bfloat16, device=device), range(8), "silu",
    )  # fmt: skip
    x = torch.ones(33, 64, dtype=torch.bfloat16, device=device)
    ids = torch.ones(33, 2, dtype=torch.int32, device=device)
    scale = torch.ones(33, 2, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.forward(weights, x, ids, scale, torch.empty_like(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unknown_activation_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"relu.*silu"):
        TritonMoe(device).load(torch.empty(1, 2, 1), torch.empty(1, 1, 1), range(1), "relu")
