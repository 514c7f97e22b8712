"""The ``knock_out`` option: silence one expert, to see which answers depend on it.

The router still chooses the silenced expert, but its output is zero. The module finds the MoE layers by their module
names (``layers.N.``) in any model.
"""

from __future__ import annotations

import re

from torch import nn

from minisgl.config import ConfigError
from minisgl.layers.moe import MoELayer

__all__ = ["knock_out"]


def knock_out(model: object, what: str) -> None:
    """Silence the expert ``what`` of ``model``: "3" is expert 3 in every layer, "5:3" is expert 3 in layer 5.

    Must be called before the weights are loaded. Raises `ConfigError` if the model has no such expert.
    """
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", what)
    if found is None:
        raise ConfigError(f"knock_out={what}: write an expert's number (3), or layer:expert (5:3).")
    layer, expert = found[1], int(found[2])
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    layers = {}
    for name, module in modules:
        if isinstance(module, MoELayer) and (number := re.search(r"layers\.(\d+)\.", name)):
            layers[int(number[1])] = module
    if not layers:
        raise ConfigError(f"knock_out={what}: the model has no experts. model=tutor-moe has some.")
    if layer is not None and int(layer) not in layers:
        raise ConfigError(f"knock_out={what}: layer {layer} has no experts. Layers that do: {_ranges(list(layers))}.")
    for index, module in layers.items():
        if layer is None or index == int(layer):
            if expert >= module.num_experts:
                raise ConfigError(f"knock_out={what}: layer {index} has experts 0 to {module.num_experts - 1}.")
            module.silenced = expert


def _ranges(numbers: list[int]) -> str:
    """Format layer numbers for a message: "0 to 5" if they are consecutive, else "0, 2, 4"."""
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))
