"""A linear layer in integers of 8 bits. A call is a batch: the names of its rows.

A workload has ``columns``, ``outputs`` and ``rows``: the name of each row, and its columns with a large number. A row
has the same numbers in each batch. The trace has a line for each row of a batch, with the first numbers of its result.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.grader.torch_operations import Operations
from minisgl.chapters.lab.museum.calls import Note, load_plugins
from minisgl.chapters.lab.museum.pieces import NAME
from minisgl.layers.linear import LinearColParallelMerged
from minisgl.plugin_manager.manager import PluginManager

load = load_plugins
SYMPTOM = "A request gets another answer in a batch than alone."
THRESHOLD = 6.0
SHOWN = 3
"""How many numbers of a result the trace has."""
PROMISE = "A row's result depends only on the row: on its integers, and on its large numbers."


class Made(Operations):
    """Counts in ``nbytes`` the bytes of the tensors that operations of torch make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(function, types, args, kwargs)
        if isinstance(found, Tensor) and not any(each.alias_info is not None for each in function._schema.returns):
            self.nbytes += found.nbytes
        return found


@dataclass
class Layer:
    """A converted layer, its weight before, and the rows of the workload."""

    layer: Any
    weight: Tensor
    rows: Mapping[str, list[int]]
    numbers: dict[str, Tensor] = field(default_factory=dict)

    def row(self, name: str) -> Tensor:
        """Return the numbers of a row."""
        if name not in self.numbers:
            generator = torch.Generator().manual_seed(sum(ord(letter) * 31**i for i, letter in enumerate(name)))
            row = torch.randn(self.weight.shape[1], generator=generator).clamp(-5, 5)
            for column in self.rows[name]:
                row[column] = row[column].sign() * (20 + 3 * row[column].abs())
            self.numbers[name] = row
        return self.numbers[name]

    def right(self, row: Tensor) -> Tensor:
        """Return the right result of a row, in float64."""
        weight = rounded(self.weight)
        large = row.abs() >= THRESHOLD
        inner = rounded(row.masked_fill(large, 0.0).unsqueeze(0))
        return (inner + row.masked_fill(~large, 0.0).double())[0] @ weight.T


def rounded(x: Tensor) -> Tensor:
    """Return x [rows, columns], rounded to its integers and multiplied with their scales, in float64."""
    scales = x.abs().amax(1, keepdim=True) / 127
    return torch.where(scales > 0, x / scales, 0.0).round().double() * scales.double()


def start(manager: PluginManager, workload: Mapping[str, Any]) -> Layer:
    """Make a layer, and convert it."""
    config = manager.make("quantization", NAME)
    config.threshold = THRESHOLD
    device = torch.device("cpu")
    converter = manager.build("quantization", config, device=device, dtype=torch.float32, build_part=None)
    generator = torch.Generator().manual_seed(workload["outputs"])
    weight = torch.randn(workload["outputs"], workload["columns"], generator=generator)
    parameter = lambda *shape: nn.Parameter(torch.empty(shape), requires_grad=False)  # noqa: E731
    context: Any = SimpleNamespace(comm=SimpleNamespace(rank=0, size=1), parameter=parameter)
    layer = LinearColParallelMerged(workload["columns"], (workload["outputs"],), ("up_proj",), context)
    model = nn.ModuleList([layer])
    converter.before_loading(model)
    layer.weight.copy_(weight)
    converter.after_loading(model)
    return Layer(layer, weight, workload["rows"])


def call(layer: Layer, names: Any, note: Note) -> dict[str, int]:
    """Compute one batch. Return the bytes of the tensors that it made."""
    x = torch.stack([layer.row(name) for name in names])
    with torch.no_grad(), Made() as made:
        got = layer.layer(x.clone())
    for place, name in enumerate(names):
        numbers = [round(float(number), 4) for number in got[place][:SHOWN]]
        note(place=place, row=name, large=layer.rows[name], result=numbers)
    for place, name in enumerate(names):
        right = layer.right(layer.row(name))
        off = float((got[place].double() - right).abs().max() / right.abs().max())
        if not off < 1e-5:
            company = ", ".join(each for i, each in enumerate(names) if i != place)
            beside = f"beside row {company}" if company else "alone"
            seen = f"The result of row {name} {beside} is off by {100 * off:.2f} % of its largest number."
            raise Broken("rows", PROMISE, seen)
    return {"made": made.nbytes}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random layer, and some batches."""
    columns, outputs = rng.choice([32, 48, 96]), rng.choice([64, 128])
    rows = {name: rng.sample(range(columns), rng.choice([0, 0, 1, 2])) for name in "abcdef"}
    batches = [rng.sample(sorted(rows), rng.randint(1, 4)) for _ in range(rng.randint(2, 6))]
    return {"calls": batches, "columns": columns, "outputs": outputs, "rows": rows}
