# ruff: noqa: E402 - without Triton the file is skipped before it imports kernels
"""Each Triton kernel compared with its torch reference, in float64 where rounding matters."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")

import triton.language as tl
from torch import Tensor

from minisgl.attention import QKNorm
from minisgl.engine import gumbel as noise
from minisgl.engine import logits_processors
from minisgl.kvcache.pool import KVPool
from minisgl.plugins.kernels.attention import references
from minisgl.plugins.kernels.ops import activation, align, gated, indices, linear, norm, routing
from minisgl.plugins.kernels.ops.blocks import max_blocks
from minisgl.plugins.kernels.ops.cpp import rope as cpp_rope
from minisgl.plugins.kernels.ops.triton import activation as triton_activation
from minisgl.plugins.kernels.ops.triton import align as triton_align
from minisgl.plugins.kernels.ops.triton import gated as triton_gated
from minisgl.plugins.kernels.ops.triton import indices as triton_indices
from minisgl.plugins.kernels.ops.triton import linear as triton_linear
from minisgl.plugins.kernels.ops.triton import norm as triton_norm
from minisgl.plugins.kernels.ops.triton import rope as triton_rope
from minisgl.plugins.kernels.ops.triton import routing as triton_routing
from minisgl.plugins.kernels.ops.triton import sampling as triton_sampling

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class Random:
    """A callable that returns new random tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device, generator: torch.Generator):
        self.dtype, self.device, self.generator = dtype, device, generator

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)


@pytest.fixture
def random(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Random:
    """Return a source of random tensors of the test's dtype."""
    return Random(dtype, device, generator)


def integers(low: int, high: int, *shape: int, of: torch.Generator, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return random integers in [low, high)."""
    return torch.randint(low, high, shape, generator=of, device=of.device, dtype=dtype)


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Check each element's error relative to its magnitude, or to 1 if its magnitude is smaller."""
    assert out.shape == expected.shape
    error = (out.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    assert error.max().item() < TOLERANCE[out.dtype]


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    """Return copies on the CPU, where the functions of `minisgl.plugins.kernels.ops` run their torch references."""
    return [t.cpu().clone() for t in tensors]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "inner"), [(1, 16), (70, 512), (2100, 96), (33, 1500)])
def test_one_row_linear(out: int, inner: int, bias: bool, random: Random) -> None:
    x, weight = random(1, inner), random(out, inner) * inner**-0.5
    b = random(out) if bias else None
    exact = linear.linear(*(t.double() for t in on_cpu(x, weight)), None if b is None else b.cpu().double())
    assert_close(triton_linear.one_row_linear(x, weight, b).cpu(), exact)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "rows", "out", "inner"),
    [
        ("few_rows_linear", 2, 64, 256),
        ("few_rows_linear", 5, 128, 512),
        ("few_rows_linear", 33, 2112, 256),
        ("few_rows_linear", 64, 4160, 256),
        ("eight_rows_linear", 2, 64, 256),
        ("eight_rows_linear", 5, 128, 512),
        ("eight_rows_linear", 8, 2112, 1280),
        ("eight_rows_linear", 7, 64, 8192),
        ("eight_rows_linear", 3, 16384, 256),
    ],
)
def test_few_and_eight_rows_linear(
    kernel: str, rows: int, out: int, inner: int, bias: bool, random: Random, compiled: bool
) -> None:
    if not compiled and out > 128:
        pytest.skip("too large for the interpreter")
    if compiled and random.dtype == torch.float32:
        pytest.skip("serves half precision only: tiles of float32 do not fit into shared memory")
    weight, b = random(out, inner) / inner**0.5, random(out) if bias else None
    x = random(rows, 2 * inner)[:, :inner]  # rows that are not contiguous
    y = getattr(triton_linear, kernel)(x, weight, b)
    wide = [None if t is None else t.cpu().double() for t in (x, weight, b)]
    assert_close(y.cpu(), torch.nn.functional.linear(*wide))  # type: ignore[arg-type]


def test_eight_rows_serve_large_matrices(random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 8 rows, if the matrix is large, has two bytes an element, and consists of whole tiles."""
    weight = random(128, 512)
    for rows, large, served in ((8, 1, True), (9, 1, False), (8, weight.nbytes + 1, False)):
        monkeypatch.setattr(triton_linear, "LARGE_BYTES", large)
        assert triton_linear.serves_eight_rows(random(rows, 512), weight) == (served and weight.itemsize == 2)
    monkeypatch.setattr(triton_linear, "LARGE_BYTES", 1)
    assert not triton_linear.serves_eight_rows(random(8, 512), random(96, 512))
    assert not triton_linear.serves_eight_rows(random(8, 384), random(128, 384))


@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (5, 96), (3, 1000), (2, 5120)])
def test_rms_norm(rows: int, dim: int, random: Random) -> None:
    x, weight = random(rows, dim), random(dim)
    expected = norm.rms_norm(*(t.double() for t in on_cpu(x, weight)), 1e-6)
    assert_close(triton_norm.rms_norm(x, weight, 1e-6).cpu(), expected)


def test_rms_norm_of_heads_in_three_dimensions(random: Random) -> None:
    x, weight = random(3, 4, 32), random(32)
    assert_close(triton_norm.rms_norm(x, weight, 1e-5).cpu(), norm.rms_norm(*on_cpu(x, weight), 1e-5))


@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (4, 100), (2, 4096)])
def test_add_rms_norm(rows: int, dim: int, random: Random) -> None:
    x, residual, weight = random(rows, dim), random(rows, dim), random(dim)
    kept, added = residual.clone(), on_cpu(x, residual)
    out, total = triton_norm.add_rms_norm(x, residual, weight, 1e-6)
    # The sum must be bit-identical: it is the residual stream of all later layers.
    assert torch.equal(total.cpu(), added[0] + added[1])
    assert torch.equal(residual, kept)
    expected = norm.rms_norm(total.cpu().double(), weight.cpu().double(), 1e-6)
    assert_close(out.cpu(), expected)


@pytest.mark.parametrize(("rows", "dim"), [(1, 32), (3, 1500), (2, 2048)])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_activations(act: str, rows: int, dim: int, random: Random) -> None:
    x = random(rows, 2 * dim)
    wide = x.cpu().double()
    match act:
        case "silu":
            out, expected = triton_activation.silu_and_mul(x), activation.silu_and_mul(wide)
        case "gelu":
            out, expected = triton_activation.gelu_and_mul(x), activation.gelu_and_mul(wide)
        case _:
            out = triton_activation.gelu_and_mul(x, approximate="tanh")
            expected = activation.gelu_and_mul(wide, approximate="tanh")
    assert_close(out.cpu(), expected)


@pytest.mark.parametrize(("rows", "dim", "inner"), [(1, 16, 64), (129, 136, 72), (600, 1024, 512), (2049, 5120, 1000)])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gated_linear(act: activation.Act, rows: int, dim: int, inner: int, random: Random, compiled: bool) -> None:
    """Shapes include tiles that cross each edge, and more tiles than programs."""
    if not compiled and dim > 136:
        pytest.skip("too large for the interpreter")
    if compiled and random.dtype == torch.float32:
        pytest.skip("serves half precision only: tiles of float32 do not fit into shared memory")
    if compiled and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU with a tensor memory accelerator: Hopper, or a later one")
    x, weight = random(rows, inner), random(2 * dim, inner) / inner**0.5
    out = triton_gated.gated_linear(x, weight, act)
    assert_close(out.cpu(), gated.gated_linear_torch(x.cpu().double(), weight.cpu().double(), act))


@pytest.mark.parametrize("group", [1, 2, 3])
def test_gated_linear_with_more_tiles_than_programs(group: int, random: Random, compiled: bool) -> None:
    if compiled:
        pytest.skip("a GPU has more programs than these tiles; test_gated_linear has larger shapes")
    x, weight, tile = random(70, 48), random(144, 48) / 7, triton_gated.Tile(16, 16, 16, group, 4, 2)
    out = triton_gated.gated_linear(x, weight, "silu", tile)
    assert_close(out, gated.gated_linear_torch(x.double(), weight.double(), "silu"))


def test_gated_linear_is_not_always_served(random: Random, compiled: bool) -> None:
    """`gated_linear` returns None for few rows, float32, strided inputs and GPUs other than Hopper."""
    x, weight = random(triton_gated.ROWS, 64), random(64, 64)
    fused = gated.gated_linear(x, weight, "silu")
    assert (fused is not None) == (compiled and x.dtype != torch.float32 and torch.cuda.get_device_capability()[0] == 9)
    assert gated.gated_linear(x[1:], weight, "silu") is None
    if compiled:
        assert not triton_gated.serves(random(triton_gated.ROWS, 128)[:, :64], weight)
        assert not triton_gated.serves(random(triton_gated.ROWS, 60), random(64, 60))


@pytest.mark.parametrize("version", ["triton", "cpp"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("normed", [True, False], ids=["QK-norm", "no norm"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "page_size"), [(4, 2, 64, 16), (3, 1, 80, 1), (16, 8, 128, 64), (1, 1, 16, 5)]
)
def test_norm_rope_store(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    normed: bool,
    layout: str,
    version: str,
    random: Random,
    compiled: bool,
) -> None:
    if version == "cpp" and not compiled:
        pytest.skip("CUDA C++ needs a CUDA device")
    run = {"triton": triton_rope, "cpp": cpp_rope}[version].norm_rope_store
    tokens, pages, device = 5, 4, random.device
    qkv = random(tokens, (q_heads + 2 * kv_heads) * head_dim)
    weights = QKNorm(random(head_dim), random(head_dim), 1e-6) if normed else None
    angles = torch.rand(tokens, head_dim // 2, generator=random.generator, device=device) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    out_cache_loc = torch.randperm(pages * page_size + tokens, generator=random.generator, device=device)[:tokens]
    pages += -(-tokens // page_size)

    def pool(dtype: torch.dtype, device: torch.device) -> KVPool:
        return KVPool(2, pages, page_size, kv_heads, head_dim, dtype, device, layout)  # type: ignore[arg-type]

    here = pool(random.dtype, device)
    q = run(qkv, q_heads, kv_heads, weights, cos_sin, here, 1, out_cache_loc)
    there = pool(torch.float64, torch.device("cpu"))
    wide = None if weights is None else QKNorm(weights.q.cpu().double(), weights.k.cpu().double(), 1e-6)
    cpu = on_cpu(qkv.double(), cos_sin, out_cache_loc)
    expected = references.norm_rope_store(cpu[0], q_heads, kv_heads, wide, cpu[1], there, 1, cpu[2])
    assert_close(q.cpu(), expected)
    for got, want in zip(here.layer(1), there.layer(1), strict=True):
        assert_close(got.cpu(), want)  # KV locations that were not written are 0 in both
    assert not here.layer(0)[0].any()


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_page_indices(rows: int, page_size: int, device: torch.device, generator: torch.Generator) -> None:
    columns = 12
    table = integers(0, 1000, rows + 3, columns, of=generator)
    req_pool_indices = torch.randperm(rows + 3, generator=generator, device=device)[:rows].int()
    seq_lens = integers(1, columns * page_size + 1, rows, of=generator)
    seq_lens[0] = columns * page_size

    def outputs(device: torch.device) -> list[Tensor]:
        sizes = (rows + 1, rows * columns, rows)
        return [torch.full((n,), -7, dtype=torch.int32, device=device) for n in sizes]

    out, expected = outputs(device), outputs(torch.device("cpu"))
    triton_indices.page_indices(table, req_pool_indices, seq_lens, page_size, *out)
    indices.page_indices(*on_cpu(table, req_pool_indices, seq_lens), page_size, *expected)
    used = int(expected[0][-1])
    assert used == sum(-(-n // page_size) for n in seq_lens.tolist())
    assert torch.equal(out[0].cpu(), expected[0])
    assert torch.equal(out[1][:used].cpu(), expected[1][:used])
    assert torch.equal(out[2].cpu(), expected[2])
    for row, req_pool_idx in enumerate(req_pool_indices.tolist()):  # and the torch reference against its definition
        begin, end = expected[0][row : row + 2].tolist()
        assert expected[1][begin:end].tolist() == table[req_pool_idx, : end - begin].tolist()


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (5, 60, 4), (3, 128, 8), (2, 4, 4)])
def test_softmax_topk(tokens: int, experts: int, k: int, renormalize: bool, random: Random) -> None:
    logits = random(tokens, experts)
    ids, weights = triton_routing.softmax_topk(logits, k, renormalize)
    wide = logits.cpu().float()
    best = wide.topk(k, dim=-1).values
    assert torch.equal(wide.gather(1, ids.cpu().long()), best)  # for equal logits torch may choose other experts
    assert all(len(set(row)) == k for row in ids.tolist())
    expected_ids, expected = routing.softmax_topk(wide, k, renormalize)
    assert expected_ids.dtype == ids.dtype == torch.int32
    assert_close(weights.cpu(), expected)


def test_softmax_topk_of_equal_logits(device: torch.device) -> None:
    ids, weights = triton_routing.softmax_topk(torch.zeros(2, 6, device=device), 3, True)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights.allclose(torch.tensor(1 / 3, device=device))


@pytest.mark.parametrize("summed", [0, 128], ids=["scanned", "summed"])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "first", "here"),
    [
        (1, 2, 8, 0, 8),
        (7, 2, 8, 0, 8),
        (40, 8, 128, 0, 128),
        (33, 4, 60, 0, 60),
        (20, 2, 8, 4, 4),
        (3, 1, 1, 0, 1),
        (25, 3, 512, 0, 512),
    ],
)
def test_align(
    tokens: int, top_k: int, experts: int, first: int, here: int, block: int, summed: int, generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton_align, "MAX_SUMMED_CHUNKS", summed)  # 0: `scan_kernel` adds up even a few chunks
    ids = torch.rand(tokens, experts, generator=generator, device=generator.device).topk(top_k).indices.int()
    pairs, owner = (t.cpu() for t in triton_align.align(ids, first, here, block))
    expected_pairs, expected_owner = align.align(ids.cpu(), first, here, block)
    assert torch.equal(pairs, expected_pairs)
    assert torch.equal(owner, expected_owner)
    # And the torch reference against its definition: every pair of a local expert once, in a block of that expert.
    placed = [(int(p), int(owner[i // block])) for i, p in enumerate(pairs) if p < ids.numel()]
    flat = ids.flatten().tolist()
    expected = [(p, e - first) for p, e in enumerate(flat) if first <= e < first + here]
    assert sorted(placed) == expected
    assert len(owner) == max_blocks(ids.numel(), here, block)


@pytest.mark.parametrize("chunks", [3, 1024])
def test_align_with_many_pairs_and_with_one_expert_only(
    chunks: int, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one and of several iterations; with 1,024 allowed, the 11,000 pairs have 172 chunks."""
    monkeypatch.setattr(triton_align, "MAX_CHUNKS", chunks)
    many = integers(0, 8, 5500, 2, of=generator)
    same = torch.full((300, 2), 5, dtype=torch.int32, device=device)
    for ids in (many, same):
        pairs, owner = triton_align.align(ids, 0, 8, 32)
        expected_pairs, expected_owner = align.align(ids.cpu(), 0, 8, 32)
        assert torch.equal(pairs.cpu(), expected_pairs)
        assert torch.equal(owner.cpu(), expected_owner)


@pytest.mark.parametrize("vocab", [320, 5000, 151_936])
@pytest.mark.parametrize("scaled", [True, False], ids=["temperature", "no temperature"])
def test_gumbel_argmax(
    vocab: int, scaled: bool, device: torch.device, generator: torch.Generator, compiled: bool
) -> None:
    """The kernel chooses the same tokens as the torch reference on the same device."""
    if vocab > 5000 and not compiled:
        pytest.skip("too large for the interpreter")
    rows = 3
    logits = torch.randn(rows, vocab, generator=generator, device=device) * 2
    logits[1, ::3] = float("-inf")
    keys = torch.tensor([noise.seed_key(seed) for seed in (0, 1, -5)], dtype=torch.int32, device=device)
    temperature = torch.tensor([0.6, 1.0, 1.7], device=device)
    req_pool_indices = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    table = torch.full((6, 5), 77, dtype=torch.int32, device=device)
    table[req_pool_indices.long(), :3] = torch.cat([keys, temperature.view(torch.int32)[:, None]], dim=1)
    positions = integers(0, 40_000, rows, of=generator)
    hashes = noise.token_hashes(vocab, device)
    tokens = triton_sampling.gumbel_argmax(logits, table, req_pool_indices, positions, hashes, scaled=scaled)
    expected = noise.gumbel(keys, positions, hashes) + (logits / temperature[:, None] if scaled else logits)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, expected.argmax(dim=1))


@triton.jit
def noise_kernel(keys, positions, hashes, out, vocab, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):  # noqa: N803
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    low, odd = triton_sampling.row_numbers(keys + 2 * row, positions + row)
    noise = triton_sampling.gumbel(tl.load(hashes + i, mask=i < vocab, other=0), low, odd, INTERPRETED)
    tl.store(out + row * vocab + i, noise, mask=i < vocab)


def test_gumbel_noise(device: torch.device, generator: torch.Generator, compiled: bool) -> None:
    """The noise is that of the torch reference, bit-identical on a GPU.

    On a GPU both use CUDA's logarithms. The interpreter uses numpy's, so there the noise is compared with a tolerance.
    """
    rows, vocab = (4000, 1000) if compiled else (20, 1000)
    keys = integers(-(2**31), 2**31 - 1, rows, 2, of=generator)
    positions = integers(0, 100_000, rows, of=generator)
    hashes = noise.token_hashes(vocab, device)
    out = torch.empty(rows, vocab, device=device)
    noise_kernel[(rows,)](keys, positions, hashes, out, vocab, BLOCK=1024, INTERPRETED=not compiled)
    expected = noise.gumbel(keys, positions, hashes)
    if compiled:
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [7, 5000])
def test_argmax(vocab: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """The first of equal maxima is chosen, in every dtype of logits."""
    logits = torch.randn(4, vocab, generator=generator, device=device).to(dtype)
    logits[1, 3:6] = 9.0
    logits[2] = float("-inf")
    logits[2, vocab - 1] = -7.0
    tokens = triton_sampling.gumbel_argmax(logits)
    assert tokens.tolist() == logits.float().argmax(dim=1).tolist()


def test_gumbel_argmax_with_one_allowed_token(device: torch.device) -> None:
    """If all other logits are -inf, the only token left is drawn in spite of the noise."""
    logits = torch.full((2, 5000), float("-inf"), device=device)
    logits[0, 4999], logits[1, 17] = -3.0, 100.0
    table = torch.tensor([[1, 2, 0], [3, 4, 0]], dtype=torch.int32, device=device)
    req_pool_indices = torch.tensor([0, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([5, 6], dtype=torch.int32, device=device)
    hashes = noise.token_hashes(5000, device)
    assert triton_sampling.gumbel_argmax(logits, table, req_pool_indices, positions, hashes).tolist() == [4999, 17]


@pytest.mark.parametrize("vocab", [31, 320, 5003])
def test_mask_tokens(vocab: int, device: torch.device, dtype: torch.dtype) -> None:
    """Forbidden tokens become -inf, exactly where the torch reference sets them, also in rows with a stride."""
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (3, words), generator=torch.Generator().manual_seed(vocab)).int()
    logits = torch.randn(5, vocab + 9).to(dtype)[:, :vocab]
    expected = logits.clone()
    logits_processors.mask_tokens(expected, rows, bits)
    wide = torch.zeros(5, vocab + 9, dtype=dtype, device=device)
    wide[:, :vocab] = logits.to(device)
    triton_sampling.mask_tokens(wide[:, :vocab], rows.to(device), bits.to(device))
    torch.testing.assert_close(wide[:, :vocab].cpu(), expected, rtol=0, atol=0)
    assert not wide[:, vocab:].any()
