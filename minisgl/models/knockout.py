"""`knock_out`: an expert that contributes nothing, to see what it was for. The router still chooses it.

Knows mixture-of-experts layers by where they stand in a model, and no architecture.
"""

from __future__ import annotations

import re

from torch import nn

from minisgl.config import ConfigError
from minisgl.layers.moe import MoELayer

__all__ = ["knock_out"]


def knock_out(model: object, what: str) -> None:
    """Silence expert ``what`` ("3": in every layer; "5:3": in layer 5), before the weights are loaded.

    Raises `ConfigError` where there is no such expert.
    """
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", what)
    if found is None:
        raise ConfigError(f"knock_out={what}: write an expert's number (3), or layer:expert (5:3).")
    layer, expert = found[1], int(found[2])
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    layers = {}
    for name, module in modules:
        if isinstance(module, MoELayer) and (place := re.search(r"layers\.(\d+)\.", name)):
            layers[int(place[1])] = module
    if not layers:
        raise ConfigError(f"knock_out={what}: the model has no experts. model=tutor-moe has some.")
    if layer is not None and int(layer) not in layers:
        raise ConfigError(f"knock_out={what}: layer {layer} has no experts. Layers that do: {_ranges(list(layers))}.")
    for number, module in layers.items():
        if layer is None or number == int(layer):
            if expert >= module.num_experts:
                raise ConfigError(f"knock_out={what}: layer {number} has experts 0 to {module.num_experts - 1}.")
            module.silenced = expert


def _ranges(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))
