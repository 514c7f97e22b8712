"""Finds the part of the group ``quantization`` that a checkpoint or the option ``quantize`` needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minisgl.config import QUANTIZE, Config, ConfigError
from minisgl.hooks import hookimpl
from minisgl.models.converter import ModelConverter
from minisgl.models.resolve import resolve_model

if TYPE_CHECKING:
    from pathlib import Path

    from minisgl.layers import Context
    from minisgl.models.config import ModelConfig
    from minisgl.plugin_manager.manager import PluginManager


@hookimpl(trylast=True)
def minisgl_convert_model(
    config: Config, manager: PluginManager, model: ModelConfig, ctx: Context
) -> ModelConverter | None:
    """Build the part, if the checkpoint has quantised weights or ``quantize`` asks for them.

    The layers are then built without memory: the part gives them other weights.
    """
    path = resolve_model(config.model)
    quantization = build_quantization(config, manager, path, model, ctx.device, ctx.dtype, ctx.part)
    if quantization is None:
        return None
    ctx.weights = torch.device("meta")
    return InMemory(quantization, ctx.device)


def build_quantization(
    config: Config,
    manager: PluginManager,
    path: Path,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    build_part: Callable[[str], Any],
) -> ModelConverter | None:
    """Build what reads the quantised weights of a checkpoint, or quantises weights. None: there is neither.

    Raises `ConfigError` if no plugin reads weights of this form, or if they are to be quantised and have experts.
    """
    stored, quantize = model.raw.get("quantization_config"), config.quantize != "auto"
    if not stored and not quantize:
        if config.quantization is not None:
            raise ConfigError(
                f"quantization is given, but the weights of {config.model} are not quantised: leave it out, or use "
                "quantize."
            )
        return None
    if quantize and model.num_experts and config.quantize != "fp8":
        raise ConfigError(
            f"quantize={config.quantize} is for dense models, but {config.model} has experts: leave quantize out."
        )
    file = path / "config.json" if path.is_dir() else path
    try:
        options, name = config.quantization, quantization_of(stored, manager) if stored else config.quantize
        if quantize and name in QUANTIZE and name != config.quantize:
            raise ConfigError(f"its weights are in {name} already, so quantize={config.quantize} can't be used.")
        if options is None:
            options = manager.make("quantization", name)
        quantization: Any = manager.build(
            "quantization",
            options,
            device=device,
            dtype=dtype,
            build_part=build_part,
        )
        quantization.read(model, quantize)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    converter: ModelConverter = quantization
    return converter


class InMemory(ModelConverter):
    """A quantization of a model that was built without memory (`minisgl.layers.context.Context.weights`).

    What the quantization leaves as it is gets memory on ``device`` before the next converter sees it.
    """

    def __init__(self, quantization: ModelConverter, device: torch.device):
        self.quantization, self.device = quantization, device
        self.open, self.after_loading = quantization.open, quantization.after_loading  # type: ignore[method-assign]
        self.prepare = quantization.prepare  # type: ignore[method-assign]

    def before_loading(self, model: nn.Module) -> None:
        """Let the quantization change the layers, and give memory to weights that have none."""
        self.quantization.before_loading(model)
        for parameter in model.parameters():
            if parameter.is_meta:
                real = nn.Parameter(torch.empty_like(parameter, device=self.device), requires_grad=False)
                torch.utils.swap_tensors(parameter, real)


def quantization_of(stored: object, manager: PluginManager) -> str:
    """Return the name of the part that reads ``stored``, the ``quantization_config`` of config.json."""
    if not isinstance(stored, Mapping):
        raise ConfigError(f"quantization_config must be a JSON object, got {stored!r}.")
    manager.load_all("quantization")
    method, parts = stored.get("quant_method"), manager.configs["quantization"]
    for name, schema in parts.items():
        if method in schema.methods:  # type: ignore[attr-defined]
            return name
    known = [repr(known) for schema in parts.values() for known in schema.methods]  # type: ignore[attr-defined]
    supported = "no plugin reads quantised weights"
    if known:
        supported = f"only {known[0]} is supported{''.join(', and ' + other for other in known[1:])}"
    raise ConfigError(
        f"quantization_config has quant_method={method!r}, but {supported}: use the checkpoint in bfloat16."
    )
