"""The tensor-parallel layers over gloo: the ranks together compute the same as one unsplit layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.attention import AttentionBackend
from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.layers import (
    Context,
    GatedMLP,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    ParallelLMHead,
    RMSNorm,
    RMSNormFused,
    VocabParallelEmbedding,
)
from minisgl.layers.weight_shards import WeightShard, weight_shards_of
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.plugins.communicator.torch import Torch as TorchLink
from minisgl.plugins.communicator.torch import TorchCommunicator
from minisgl.plugins.kernels.converted import layers
from minisgl.plugins.kernels.converted.layers import convert_layers
from minisgl.plugins.kernels.ops.activation import Act
from minisgl.plugins.kernels.ops.gated import gated_linear_torch
from minisgl.plugins.models.experts import MoELayer
from minisgl.plugins.moe.torch import TorchMoe
from minisgl.testing.ranks import run_ranks

CPU = torch.device("cpu")
NEAR = {"atol": 1e-5, "rtol": 1e-5}


class Tensors:
    """A `WeightSource` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors
        self.names = frozenset(tensors)

    def fill(self, shard: WeightShard) -> None:
        """Copy the shard's slice; its shape must be that of the tensor."""
        tensor = self.tensors[shard.name]
        assert tuple(tensor.shape) == shard.shape
        shard.target.copy_(tensor[shard.index])


def context(comm: Communicator | None = None) -> Context:
    """Return a context on the CPU, with one rank unless a communicator is given."""
    attention: AttentionBackend = TorchAttention(Torch(), CPU)
    comm = comm or TorchCommunicator(TorchLink(), 0, 1, "", CPU)
    return Context(comm, attention, CPU, torch.float32, lambda group: TorchMoe())


def fill(layer: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Load the layer's weights from ``tensors``; every tensor must be used."""
    source = Tensors(tensors)
    with torch.no_grad():
        shards = list(weight_shards_of(layer, prefix, source.names))
        for shard in shards:
            source.fill(shard)
    assert {shard.name for shard in shards} == source.names
    for module in layer.modules():
        if isinstance(module, MoELayer):
            module.after_load()


@torch.inference_mode()
def on_ranks(size: int, work: Callable[[Context], Tensor]) -> list[Tensor]:
    """Run ``work`` on ``size`` ranks, each in a thread, and return the results in rank order."""

    def rank(comm: Communicator) -> Tensor:
        with torch.inference_mode():
            return work(context(comm))

    return run_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab", [30, 31, 5])
def test_vocabulary(size: int, vocab: int) -> None:
    """Embedding and LM head, tied and untied. Neither 2 nor 3 divides 31; with 5 tokens the last rank has few rows."""
    weight, own = torch.randn(vocab, 8), torch.randn(vocab, 8)
    tokens, hidden = torch.tensor([0, vocab - 1, vocab // 2, 1]), torch.randn(3, 8)

    def work(ctx: Context) -> Tensor:
        embedding = VocabParallelEmbedding(vocab, 8, ctx)
        fill(embedding, {"embed.weight": weight}, "embed.")
        kept = tokens.clone()
        torch.testing.assert_close(embedding(tokens), weight[tokens])
        assert torch.equal(tokens, kept)
        tied = ParallelLMHead(vocab, 8, ctx, tied=embedding)
        assert not list(tied.weight_shards("lm_head.", None))
        head = ParallelLMHead(vocab, 8, ctx)
        fill(head, {"lm_head.weight": own}, "lm_head.")
        return torch.stack((tied(hidden), head(hidden)))

    for got in on_ranks(size, work):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, torch.stack((hidden @ weight.T, hidden @ own.T)), **NEAR)


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(bias: bool) -> None:
    """Merged column-parallel and row-parallel layers compute a gated MLP on one and two ranks."""
    shapes = {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}
    tensors = {f"mlp.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {f"mlp.{name}.bias": torch.randn(shape[0]) for name, shape in shapes.items()} if bias else {}
    x = torch.randn(5, 8)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"mlp.{name}.weight"], tensors.get(f"mlp.{name}.bias"))

    want = linear(F.silu(linear(x, "gate_proj")) * linear(x, "up_proj"), "down_proj")

    def work(ctx: Context) -> Tensor:
        mlp = GatedMLP(8, 12, "silu", ctx, bias=bias)
        fill(mlp, tensors, "mlp.")
        return ctx.comm.all_reduce(mlp(x))

    for size in (1, 2):
        for got in on_ranks(size, work):
            torch.testing.assert_close(got, want, **NEAR)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_mlp_in_one_launch(act: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gated_linear`, if it serves, replaces product and activation, except if the layer has biases.

    On a GPU it serves for many rows; the test replaces it by its torch reference.
    """
    launches = []

    def fused(x: Tensor, weight: Tensor, name: Act) -> Tensor:
        launches.append(name)
        return gated_linear_torch(x, weight, name)

    layer = GatedMLP(8, 12, act, context(), bias=bias)
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(5, 8)
    separate = layer(x)
    convert_layers(layer)
    monkeypatch.setattr(layers, "gated_linear", fused)
    torch.testing.assert_close(layer(x), separate, **NEAR)
    assert len(launches) == (not bias)


def test_row_parallel() -> None:
    """The layer sums the partial products of all ranks and adds the bias once."""
    weight, bias, x = torch.randn(6, 9), torch.randn(6), torch.randn(4, 9)

    def work(ctx: Context) -> Tensor:
        layer = LinearRowParallel(9, 6, ctx, bias=True)
        fill(layer, {"o.weight": weight, "o.bias": bias}, "o.")
        return layer(x.chunk(3, dim=1)[ctx.comm.rank])

    for got in on_ranks(3, work):
        torch.testing.assert_close(got, F.linear(x, weight, bias), **NEAR)


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 2), (2, 4), (1, 4)])
def test_merged_qkv(kv_heads: int, size: int) -> None:
    """A rank has whole query heads and the KV heads that these attend to, copied if there are fewer than ranks."""
    dim, q_heads = 3, 4
    tensors = {f"attn.{name}_proj.weight": torch.randn(n * dim, 8) for name, n in zip("qkv", (4, kv_heads, kv_heads))}
    q, k, v = (tensor.view(-1, dim, 8) for tensor in tensors.values())

    def work(ctx: Context) -> Tensor:
        layer = LinearQKVMerged(8, q_heads, kv_heads, dim, ctx)
        fill(layer, tensors, "attn.qkv_proj.")
        assert (layer.q_heads, layer.kv_heads) == (q_heads // size, max(1, kv_heads // size))
        return layer.weight.view(-1, dim, 8).clone()

    for rank, got in enumerate(on_ranks(size, work)):
        mine = range(rank * q_heads // size, (rank + 1) * q_heads // size)
        serving = sorted({head * kv_heads // q_heads for head in mine})
        assert torch.equal(got, torch.cat((q[mine.start : mine.stop], k[serving], v[serving])))


def test_fused_norm() -> None:
    """`RMSNormFused` all-reduces its input before adding the residual; without a residual it does not."""
    parts, residual, weight = torch.randn(2, 5, 8), torch.randn(5, 8), torch.rand(8)

    def work(ctx: Context) -> Tensor:
        norm = RMSNormFused(8, 1e-6, ctx)
        fill(norm, {"norm.weight": weight}, "norm.")
        normed, total = norm(parts[ctx.comm.rank].clone(), residual.clone())
        first, begun = norm(residual)
        assert torch.equal(begun, residual)
        return torch.stack((normed, total, first))

    plain = RMSNorm(8, 1e-6, context())
    fill(plain, {"weight": weight})
    total = parts.sum(0) + residual
    for got in on_ranks(2, work):
        torch.testing.assert_close(got, torch.stack((plain(total), total, plain(residual))), **NEAR)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_moe(stacked: bool, renormalize: bool) -> None:
    """The layer computes the weighted sum of the chosen experts, from both checkpoint layouts, on one and two ranks."""
    experts, top_k, hidden, inner = 5, 2, 8, 6
    router = torch.randn(experts, hidden)
    gate, up = torch.randn(experts, inner, hidden), torch.randn(experts, inner, hidden)
    down, x = torch.randn(experts, hidden, inner), torch.randn(7, hidden)
    tensors = {"mlp.gate.weight": router}
    if stacked:
        tensors |= {"mlp.experts.gate_up_proj": torch.cat((gate, up), dim=1), "mlp.experts.down_proj": down}
    else:
        for e in range(experts):
            parts = {"gate_proj": gate[e], "up_proj": up[e], "down_proj": down[e]}
            tensors |= {f"mlp.experts.{e}.{name}.weight": part for name, part in parts.items()}

    scores = (x @ router.T).softmax(-1)
    scale, chosen = scores.topk(top_k)
    scale = scale / scale.sum(-1, keepdim=True) if renormalize else scale
    want = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(chosen.tolist(), scale.tolist())):
        for e, w in zip(ids, weights):
            want[token] += w * (down[e] @ (F.silu(gate[e] @ x[token]) * (up[e] @ x[token])))

    def work(ctx: Context) -> Tensor:
        layer = MoELayer(hidden, inner, experts, top_k, "silu", ctx, renormalize=renormalize, reduce=True)
        fill(layer, tensors, "mlp.")
        return layer(x)

    for size in (1, 2):
        for got in on_ranks(size, work):
            torch.testing.assert_close(got, want, **NEAR)


def test_indivisible_sizes_are_refused() -> None:
    """Sizes that the number of ranks does not divide raise an error that names them."""

    def work(ctx: Context) -> Tensor:
        with pytest.raises(ConfigError, match=r"tp=2 does not divide the model's up_proj rows \(9\)"):
            LinearColParallelMerged(8, (8, 9), ("gate_proj", "up_proj"), ctx)
        with pytest.raises(ConfigError, match=r"tp=2 does not divide the model's expert size .* \(7\)"):
            MoELayer(8, 7, 4, 2, "silu", ctx, renormalize=True)
        return torch.empty(0)

    on_ranks(2, work)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act 'relu' is not supported: use silu"):
        GatedMLP(8, 12, "relu", context())
