"""A decoder layer of Qwen3 over ranks that are threads. A call is a forward pass: its ranks and tokens.

The trace has a line for each collective: its kind, the shape of a rank's part, and the mean square of each rank's part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from minisgl.chapters.lab.gates.shard import LAYER, far, near
from minisgl.chapters.lab.grader.gate import Broken, amount
from minisgl.chapters.lab.grader.model_parts import PartRunner, RandomWeights, Shape, qwen3, run_ranks, x_of
from minisgl.chapters.lab.museum.calls import Note
from minisgl.plugin_manager.manager import PluginManager

SYMPTOM = "Answers are right on one GPU, and beside the point on several."


def load(file: Path) -> Any:
    """Return the class `Layer` of a plugin file."""
    plugin = PluginManager().add(str(file))
    return plugin.module.Layer


def start(layer: Any, workload: Mapping[str, Any]) -> Any:
    """Return the class: each call builds the layer anew."""
    return layer


def call(layer: Any, sizes: Any, note: Note) -> dict[str, int]:
    """Run a layer for ``[ranks, tokens]``. Return how many numbers the ranks exchange, and load as weights."""
    ranks, tokens = sizes
    shape = Shape(ranks, q_heads=12, kv_heads=2 if ranks < 3 else ranks, head_dim=4, inner=24, tokens=tokens, layers=1)
    weights: list[int] = []

    def mine(comm: Any) -> Tensor:
        runner, source = PartRunner(shape, comm), RandomWeights()
        made = layer(0, shape.config, runner.ctx)
        source.load(made, LAYER)
        weights.append(sum(shard.target.numel() for shard in source.shards))
        runner.prepare(made.self_attn.spec)
        out: Tensor = made(runner.x, None, runner.cos_sin, runner.out_cache_loc)[0]
        return out

    def alone(comm: Any) -> Tensor:
        runner = PartRunner(replace(shape, ranks=1), comm)
        made = qwen3()(shape.config, runner.ctx).layers[0]
        RandomWeights().load(made, LAYER)
        runner.prepare(made.self_attn.spec)
        x, residual = made(x_of(shape), None, runner.cos_sin, runner.out_cache_loc)
        out: Tensor = x + residual
        return out

    (want,), _ = run_ranks(1, alone)
    outs, collectives = run_ranks(ranks, mine)
    for each in collectives:
        squares = [round(float(part.square().mean()), 4) for part in each.parts]
        note(ranks=ranks, tokens=tokens, collective=each.kind, shape=list(each.parts[0].shape), squares=squares)
    if not collectives:
        note(ranks=ranks, tokens=tokens, collective=None)
    if not all(near(out, want) for out in outs):
        promise = f"A layer computes the same on {amount(ranks, 'rank')} as on one."
        raise Broken("parts", promise, f"With {amount(tokens, 'token')}, the result is {far(outs, want)}.")
    # A ring sends about twice a tensor to sum it, and n parts to gather them.
    shares = {"all_reduce": 2}
    exchanged = sum(shares.get(each.kind, ranks) * each.parts[0].numel() for each in collectives)
    return {"exchanged": exchanged, "weights": sum(weights)}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random forward pass."""
    return {"calls": [[rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 11, 12, 13, rng.randint(1, 30)])]]}
