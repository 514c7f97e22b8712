"""A MoE backend. A call is a batch: the experts that each token chose. All batches use the same layer's weights.

A workload has ``experts`` experts; those of this rank are ``here`` of them, from ``first`` on. The trace has a line for
each token: its choices, those that are on this rank, and the first numbers of its result.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.chapters.lab.gates.experts import HIDDEN, INNER, first_wrong
from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.museum.calls import Note, load_plugins
from minisgl.chapters.lab.museum.pieces import NAME
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.moe import MoeCase, Problem, WeightCounter, problem

load = load_plugins
SYMPTOM = "Some tokens get other results in a busy server than in an idle one."
SHOWN = 3
"""How many numbers of a result the trace has."""


@dataclass
class Layer:
    """A backend and the weights of a layer, in ``problem``, whose tokens each call replaces."""

    moe: Any
    weights: Any
    problem: Problem


def start(manager: PluginManager, workload: Mapping[str, Any]) -> Layer:
    """Make a new backend, and load the weights of a layer."""
    moe = manager.build("moe", manager.make("moe", NAME), device=torch.device("cpu"))
    here = range(workload["first"], workload["first"] + workload["here"])
    given = problem(MoeCase(1, 1, workload["experts"], local_experts=here, hidden=HIDDEN, inner=INNER))
    return Layer(moe, moe.load(given.gate_up, given.down, here, "silu"), given)


def call(layer: Layer, tokens: Any, note: Note) -> dict[str, int]:
    """Compute one batch, and count the rows and the weights that its products read."""
    generator = torch.Generator().manual_seed(sum((7 * i + 1) * e for i, each in enumerate(tokens) for e in each))
    ids = torch.tensor(tokens, dtype=torch.int32)
    x = torch.randn(len(ids), HIDDEN, generator=generator)
    scale = torch.rand(ids.shape, generator=generator) + 0.5
    given = layer.problem._replace(x=x, ids=ids, scale=scale)
    out = torch.full_like(x, torch.nan)
    with WeightCounter(given) as counter:
        got = layer.moe.forward(layer.weights, x.clone(), ids.clone(), scale.clone(), out)
    for token, chosen in enumerate(tokens):
        here = [expert for expert in chosen if expert in given.local_experts]
        numbers = [round(float(number), 4) for number in got[token][:SHOWN]]
        note(token=token, experts=chosen, here=here, result=numbers)
    if got is not out:
        raise Broken("out", "`forward` writes the sums into `out` and returns `out`.", "It returned another tensor.")
    wrong = first_wrong(given, got.double())
    if wrong is not None:
        raise wrong
    return {"rows": counter.rows, "read": counter.read}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random layer, and some batches."""
    experts = rng.randint(2, 9)
    here = rng.randint(1, experts)
    top_k = rng.randint(1, min(3, experts))
    batches = [[rng.sample(range(experts), top_k) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(2, 5))]
    return {"calls": batches, "experts": experts, "first": rng.randint(0, experts - here), "here": here}
