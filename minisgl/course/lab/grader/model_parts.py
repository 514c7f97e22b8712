"""A model's parts on a bench: shapes, weights, pages and ranks that meet in memory, for the lab `shard`.

Knows the tensor-parallel layers and the shared decoder's Qwen3, and nothing of a student.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.attention import AttnBatch
from minisgl.course.lab.grader.gate import Broken, Invalid
from minisgl.kvcache.pool import KVPool
from minisgl.layers import Context, RoPE
from minisgl.layers.weight_shards import WeightShard, weight_shards_of
from minisgl.models.config import ModelConfig
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.meeting import Collective, Meeting, MeetingViolation

__all__ = ["Bench", "Drawn", "Shape", "make", "meet", "qwen3", "shipped", "show", "x_of"]

CPU = torch.device("cpu")


@lru_cache(maxsize=1)
def shipped() -> PluginManager:
    """What a model needs beside itself."""
    manager = PluginManager()
    for name in ("attention.torch", "communicator.torch", "models.qwen3"):
        manager.add(f"minisgl.plugins.{name}")
    return manager


@lru_cache(maxsize=1)
def qwen3() -> Any:
    """The shared decoder's Qwen3, which the student's is held against."""
    return shipped().models()["Qwen3ForCausalLM"]


class Drawn:
    """Weights from their names: the same model for any number of ranks. ``pieces`` is what was asked for."""

    names = None

    def __init__(self) -> None:
        self.pieces: list[WeightShard] = []

    def fill(self, piece: WeightShard) -> None:
        """Norms are drawn around 1, matrices so that sizes are kept."""
        self.pieces.append(piece)
        generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(piece.name)))
        noise = torch.randn(piece.shape, generator=generator)
        whole = 1 + 0.3 * noise if "norm" in piece.name else noise / max(piece.shape[-1], 1) ** 0.5
        piece.target.copy_(whole[piece.index])

    def load(self, module: nn.Module, prefix: str) -> None:
        """Fill a part of a model."""
        with torch.no_grad():
            for piece in weight_shards_of(module, prefix, None):
                self.fill(piece)
        for each in module.modules():
            after_load = getattr(each, "after_load", None)
            if after_load is not None:
                after_load()


@dataclass(frozen=True)
class Shape:
    """One workload."""

    ranks: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    tokens: int
    layers: int = 2
    bias: bool = False

    @staticmethod
    def of(workload: dict[str, Any]) -> Shape:
        """Raises `Invalid` for what can't be cut, or computed."""
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
        return 24

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": 40,
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.q_heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "max_position_embeddings": 64,
                "attention_bias": self.bias,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        )

    def __str__(self) -> str:
        heads = f"{self.q_heads} query and {self.kv_heads} kv heads of {self.head_dim}"
        more = f", {self.layers} layers" + ", biases" * self.bias
        return f"{self.ranks} ranks, {heads}, inner size {self.inner}{more}, {self.tokens} tokens"


def make(rng: random.Random, size: int) -> dict[str, Any]:
    ranks = rng.choice([1, 2, 2, 4])
    kv_heads = rng.choice([1, 2, 4])
    q_heads = max(ranks, kv_heads) * rng.randint(1, 2)
    return {
        "ranks": ranks,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": rng.choice([4, 6, 8]),
        "inner": ranks * rng.randint(1, 6),
        "tokens": rng.randint(1, 2 + size // 4),
        "layers": rng.randint(1, 2),
        "bias": rng.random() < 0.2,
    }


def show(workload: dict[str, Any]) -> str:
    return str(Shape(**workload))


class Bench:
    """One rank's surroundings for parts of a model: pool, attention, positions."""

    def __init__(self, shape: Shape, comm: Any, kv_heads: int | None = None):
        self.shape = shape
        attention = shipped().build("attention", shipped().make("attention", "torch"), device=CPU)
        self.ctx = Context(comm, attention, None, CPU, torch.float32)
        self.kv_heads = kv_heads or max(1, shape.kv_heads // comm.size)
        self.cos_sin = RoPE(shape.config.rope, shape.head_dim, 64, CPU)(torch.arange(shape.tokens))
        self.where = torch.arange(shape.tokens)

    def ready(self, spec: Any) -> None:
        """Make the pool and plan one prompt."""
        n = self.shape.tokens
        self.ctx.pool = KVPool(1, n + 1, 1, self.kv_heads, self.shape.head_dim, torch.float32, CPU)
        self.ctx.attention.bind(self.ctx.pool, [spec], [])
        indptr, seq_lens = np.array([0, n], np.int32), np.array([n], np.int32)
        table = torch.arange(n, dtype=torch.int32).unsqueeze(0)
        on_device = torch.from_numpy(indptr), torch.from_numpy(seq_lens)
        slots = torch.zeros(1, dtype=torch.int32)
        self.ctx.attention.plan(AttnBatch(int(n == 1), indptr, seq_lens, *on_device, slots, table))


def meet(ranks: int, work: Callable[[Any], Any]) -> tuple[list[Any], list[Collective]]:
    """``work`` on ranks in memory, and what they exchanged. Raises `Broken` where they miss each other."""
    meeting = Meeting(ranks)
    try:
        return meeting.run(work), meeting.held
    except MeetingViolation as error:
        raise Broken("miss", "All ranks come to the same exchanges.", f"{str(error).capitalize()}.") from error


def x_of(shape: Shape) -> Tensor:
    return torch.randn(shape.tokens, shape.hidden, generator=torch.Generator().manual_seed(3))
