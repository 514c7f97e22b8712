"""What the options ``knock_out`` and ``moe`` ask of a model that has experts, or has none.

``knock_out`` silences one expert, to see which answers depend on it. The router still chooses the silenced expert, but
its output is zero. The module finds the MoE layers by their module names (``layers.N.``) in any model.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from minisgl.config import Config, ConfigError
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from minisgl.models.converter import ModelConverter
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.plugins.models.experts import MoELayer

log = logging.getLogger(__name__)


@hookimpl
def minisgl_convert_model(config: Config, manager: PluginManager) -> ModelConverter | None:
    """Silence the expert of ``knock_out``. Warn if ``moe`` selects a backend and the model has no experts."""
    backend = manager.name_of("moe", config.moe)
    if config.knock_out is None and backend in ("auto", "null"):
        return None
    from minisgl.models.converter import ModelConverter

    class MoeOptions(ModelConverter):
        def before_loading(self, model: nn.Module) -> None:
            layers = moe_layers(model)
            if config.knock_out is not None:
                knock_out(layers, config.knock_out)
            if not layers and backend not in ("auto", "null"):
                log.warning("moe=%s is not used: %s has no experts", backend, config.model)

    return MoeOptions()


def moe_layers(model: nn.Module) -> dict[int, MoELayer]:
    """Return the MoE layers of ``model`` by the number of their decoder layer."""
    from minisgl.plugins.models.experts import MoELayer

    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and (number := re.search(r"layers\.(\d+)\.", name)):
            layers[int(number[1])] = module
    return layers


def knock_out(layers: dict[int, MoELayer], what: str) -> None:
    """Silence the expert ``what``: "3" is expert 3 in all ``layers``, "5:3" is expert 3 in layer 5.

    Must be called before the weights are loaded. Raises `ConfigError` if the model has no such expert.
    """
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", what)
    if found is None:
        raise ConfigError(f"knock_out={what}: write an expert's number (3), or layer:expert (5:3).")
    layer, expert = found[1], int(found[2])
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
