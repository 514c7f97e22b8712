"""A graph runner in the tiny engine of `minisgl.testing.graph`. A call is a decode step: its number of rows.

The trace has a line for each row of the bucket that is replayed, as it is in the buffers on the device.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.chapters.lab.gates.replay import sentence
from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.museum.calls import Note, load_plugins
from minisgl.chapters.lab.museum.pieces import NAME
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.graph.replaying.simulated_graph import GraphViolation
from minisgl.testing.graph import RULES, GraphFault, GraphRig

load = load_plugins
SYMPTOM = "An answer changes when another request ends: its KV was overwritten."
LINES = ("token", "position", "location", "request", "length")


@dataclass
class Steps:
    """A runner, the largest number of rows of a step, and the engine, which the first call makes."""

    runner: Any
    most: int
    rig: GraphRig | None = None


def start(manager: PluginManager, workload: Mapping[str, Any]) -> Steps:
    """Make a runner for steps of at most ``rows`` rows."""
    return Steps(manager.build("graph", manager.make("graph", NAME), device=torch.device("cpu")), workload["rows"])


def call(steps: Steps, rows: Any, note: Note) -> dict[str, int]:
    """Run one decode step of the first ``rows`` requests. Return the rows that were recorded and computed."""
    recorded, buffers = 0, []
    try:
        if steps.rig is None:
            steps.rig = GraphRig(steps.runner, steps.most)
            recorded = sum(key.rows for key in steps.rig.keys)
        steps.rig.step(rows)
    except GraphFault as fault:
        raise Broken(fault.rule, RULES[fault.rule], f"{sentence(fault.text)}.") from fault
    except GraphViolation as fault:
        raise Broken("capture", RULES["capture"], fault.text) from fault
    finally:
        key = min((key for key in steps.rig.inputs if key.rows >= rows), default=None) if steps.rig else None
        if steps.rig and key:
            buffers = steps.rig.inputs[key][0].tokens.packed.t().tolist()
        for row, column in enumerate(buffers):
            note(bucket=len(buffers), row=row, padding=row >= rows, **dict(zip(LINES, column, strict=True)))
    return {"recorded": recorded, "rows": len(buffers) or rows}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return random decode steps."""
    most = min(2 + number // 2, 9)
    return {"rows": most, "calls": [rng.randint(1, most) for _ in range(min(4 + number, 20))]}
