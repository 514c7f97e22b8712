"""Runs parts of a model alone, for lab `shard`: with random shapes and weights, on ranks that are threads.

Knows the tensor-parallel layers and the shared decoder's Qwen3. Does not know the student's file.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minisgl.attention import AttnBatch
from minisgl.chapters.lab.grader.gate import Broken, Invalid, amount
from minisgl.kvcache.pool import KVPool
from minisgl.layers import Context, RoPE
from minisgl.layers.weight_shards import WeightShard, weight_shards_of
from minisgl.models.config import ModelConfig
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.meeting import Collective, Meeting, MeetingViolation

__all__ = ["PartRunner", "RandomWeights", "Shape", "make", "qwen3", "run_ranks", "shipped", "show", "x_of"]

CPU = torch.device("cpu")


@lru_cache(maxsize=1)
def shipped() -> PluginManager:
    """Return a plugin manager with the shipped plugins that a model needs."""
    manager = PluginManager()
    for name in ("attention.torch", "communicator.torch", "models.qwen3"):
        manager.add(f"minisgl.plugins.{name}")
    return manager


@lru_cache(maxsize=1)
def qwen3() -> Any:
    """Return the shipped Qwen3 model class, the reference for the student's class."""
    return shipped().models()["Qwen3ForCausalLM"]


class RandomWeights:
    """A source of random weights that depend only on a tensor's name: every number of ranks gets the same model.

    ``shards`` lists the shards that were loaded. Another ``model`` has other weights.
    """

    names = None

    def __init__(self, model: int = 0) -> None:
        self.model = model
        self.shards: list[WeightShard] = []

    def fill(self, shard: WeightShard) -> None:
        """Fill a shard: a norm's weights are near 1, and a matrix keeps the size of its input."""
        self.shards.append(shard)
        generator = torch.Generator().manual_seed(
            sum(ord(c) * (i + 1) for i, c in enumerate(shard.name)) + 100_000 * self.model
        )
        noise = torch.randn(shard.shape, generator=generator)
        whole = 1 + 0.3 * noise if "norm" in shard.name else noise / max(shard.shape[-1], 1) ** 0.5
        shard.target.copy_(whole[shard.index])

    def load(self, module: nn.Module, prefix: str) -> None:
        """Fill all weights of a part of a model. ``prefix`` is the part's path in the checkpoint."""
        with torch.no_grad():
            for shard in weight_shards_of(module, prefix, None):
                self.fill(shard)
        for each in module.modules():
            after_load = getattr(each, "after_load", None)
            if after_load is not None:
                after_load()


@dataclass(frozen=True)
class Shape:
    """One workload: the sizes of a model, the number of ranks, and the number of prompt tokens."""

    ranks: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    tokens: int
    layers: int = 2
    bias: bool = False
    window: int = 0
    full: int = 0

    @staticmethod
    def of(workload: dict[str, Any]) -> Shape:
        """Return the shape of a workload. Raise `Invalid` if it can't be divided over the ranks."""
        s = Shape(**workload)
        if min(s.ranks, s.q_heads, s.kv_heads, s.head_dim, s.inner, s.tokens, s.layers) < 1 or s.head_dim % 2:
            raise Invalid
        if s.q_heads % s.kv_heads or s.q_heads % s.ranks or s.inner % s.ranks:
            raise Invalid
        if s.kv_heads % s.ranks and s.ranks % s.kv_heads:
            raise Invalid
        return s

    @property
    def hidden(self) -> int:
        """The hidden size of the model."""
        return 24

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration of a Qwen3 of this shape. With a window, all layers but the first ``full`` have it."""
        sliding = {"sliding_window": self.window, "use_sliding_window": True, "max_window_layers": self.full}
        return ModelConfig.from_dict(
            {
                **(sliding if self.window else {}),
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": 40,
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.q_heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "max_position_embeddings": 8192,
                "attention_bias": self.bias,
                "rms_norm_eps": 0.05,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        )

    def __str__(self) -> str:
        heads = f"{self.q_heads} query and {amount(self.kv_heads, 'kv head')} of {self.head_dim}"
        more = f", {amount(self.layers, 'layer')}" + ", biases" * self.bias
        if self.window:
            more += f", from layer {self.full} on with a sliding window of {self.window}"
        return f"{amount(self.ranks, 'rank')}, {heads}, inner size {self.inner}{more}, {amount(self.tokens, 'token')}"


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload: a model's shape and a number of ranks that divides the shape."""
    if size == 3:  # more tokens than a buffer of a fixed size may hold
        return {"ranks": 2, "q_heads": 2, "kv_heads": 2, "head_dim": 6, "inner": 4, "tokens": 2100, "layers": 1,
                "bias": False, "window": 0, "full": 0}  # fmt: skip
    if size in (4, 5):  # a sliding window, which the last layer has, or no layer but those behind it
        return {"ranks": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 4, "inner": 3, "tokens": 9, "layers": 2,
                "bias": False, "window": 4, "full": size - 3}  # fmt: skip
    if size == 6:  # more layers than the other workloads have
        return {"ranks": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 6, "inner": 10, "tokens": 3, "layers": 4,
                "bias": False, "window": 0, "full": 0}  # fmt: skip
    if size == 7:  # more ranks than the others have, and than there are kv heads
        return {"ranks": 8, "q_heads": 8, "kv_heads": 2, "head_dim": 4, "inner": 16, "tokens": 2, "layers": 1,
                "bias": False, "window": 0, "full": 0}  # fmt: skip
    ranks = rng.choice([1, 2, 2, 3, 4])
    kv_heads = rng.choice([1, 3] if ranks == 3 else [1, 2, 4])
    q_heads = max(ranks, kv_heads) * rng.randint(1, 2)
    return {
        "ranks": ranks,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": rng.choice([4, 6, 8]),
        "inner": ranks * rng.randint(1, 6),
        "tokens": rng.randint(1, 2 + size // 4),
        "layers": rng.randint(1, 2),
        "bias": False,  # Qwen3 has no biases, and the lab's text does not ask for them
        "window": 0,
        "full": 0,
    }


def show(workload: dict[str, Any]) -> str:
    """Describe a workload in one line."""
    return str(Shape(**workload))


class PartRunner:
    """What one rank needs to run a part of a model: the context, the KV pool, and the positions of one prompt."""

    def __init__(self, shape: Shape, comm: Any, dtype: torch.dtype = torch.float32):
        self.shape = shape
        attention = shipped().build("attention", shipped().make("attention", "torch"), device=CPU)
        self.ctx = Context(comm, attention, CPU, dtype)
        self.kv_heads = max(1, shape.kv_heads // comm.size)
        self.rope = RoPE(shape.config.rope, shape.head_dim, max(64, shape.tokens) + 8, CPU)
        self.cos_sin = self.rope(torch.arange(shape.tokens))
        self.out_cache_loc = torch.arange(shape.tokens)
        self.x = x_of(shape).to(dtype)

    def prepare(self, spec: Any) -> None:
        """Create the KV pool and plan attention for one prompt. ``spec`` is the layer's `LayerSpec`."""
        n = self.shape.tokens
        self.spec = spec
        dtype = self.ctx.dtype
        self.ctx.pool = KVPool(self.shape.layers, n + 1, 1, self.kv_heads, self.shape.head_dim, dtype, CPU)
        self.ctx.attention.bind(self.ctx.pool, [spec], [])
        cu_seqlens_q, seq_lens = np.array([0, n], np.int32), np.array([n], np.int32)
        page_table = self.out_cache_loc.int().unsqueeze(0)  # pages of one token
        on_device = torch.from_numpy(cu_seqlens_q), torch.from_numpy(seq_lens)
        req_pool_indices = torch.zeros(1, dtype=torch.int32)
        batch = AttnBatch(int(n == 1), cu_seqlens_q, seq_lens, *on_device, req_pool_indices, page_table)
        self.ctx.attention.plan(batch)

    def next_step(self) -> None:
        """Write the inputs of another step into the same tensors: other positions, KV locations and hidden states.

        The context then has another pool: keys and values that code stores in the first one are not read any more.
        """
        # Old positions in place of these would change the distances between tokens: RoPE depends on nothing else.
        self.cos_sin.copy_(self.rope((5 + 3 * torch.arange(self.shape.tokens)) % 64))
        self.out_cache_loc.copy_(self.out_cache_loc.flip(0) + 1)
        self.x.copy_(0.5 - self.x.flip(0))
        if self.ctx.pool is not None:
            self.prepare(self.spec)


class _NanInNewMemory(TorchFunctionMode):
    """Fills the memory of `torch.empty` and its relatives with NaN, in this thread."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in (torch.empty, torch.empty_like, Tensor.new_empty) and out.is_floating_point():
            out.fill_(torch.nan)
        return out


def run_ranks(ranks: int, work: Callable[[Any], Any], *, nan: bool = True) -> tuple[list[Any], list[Collective]]:
    """Run ``work(comm)`` for each rank in a thread. Return the results, and the collectives that the ranks exchanged.

    With ``nan``, new memory holds NaN, such as that of weights before they are loaded. Raise `Broken` if the ranks do
    not call the same collectives in the same order.
    """
    meeting = Meeting(ranks)

    def run(comm: Any) -> Any:
        with _NanInNewMemory() if nan else nullcontext():
            return work(comm)

    try:
        return meeting.run(run), meeting.collectives
    except MeetingViolation as error:
        promise = "All ranks call the same collectives in the same order."
        raise Broken("miss", promise, f"{str(error).capitalize()}.") from error


def x_of(shape: Shape) -> Tensor:
    """Return the input of a part: random numbers, [tokens, hidden]."""
    return torch.randn(shape.tokens, shape.hidden, generator=torch.Generator().manual_seed(3))
