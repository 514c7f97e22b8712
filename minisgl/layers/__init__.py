"""The tensor-parallel layers of a model. Each layer takes a `Context` and holds only its own rank's weights."""

from __future__ import annotations

from minisgl.layers.attention import AttentionLayer, RMSNorm, RMSNormFused, RoPE, RopeConfig
from minisgl.layers.context import Context
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import (
    GatedMLP,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    gelu_and_mul,
    silu_and_mul,
)

__all__ = [
    "AttentionLayer",
    "Context",
    "GatedMLP",
    "LinearColParallelMerged",
    "LinearQKVMerged",
    "LinearRowParallel",
    "ParallelLMHead",
    "RMSNorm",
    "RMSNormFused",
    "RoPE",
    "RopeConfig",
    "VocabParallelEmbedding",
    "gelu_and_mul",
    "silu_and_mul",
]
