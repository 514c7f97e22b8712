"""Model converters: parts that change the modules of a built model from outside, as torchtitan's converters do.

The layers of the core are plain torch. A converter gives some of them another class, which computes the same with
faster kernels, or stores the weights in another form. A module that is not exactly one of the core's layers, because a
plugin replaced it, is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from minisgl.layers.weight_shards import WeightSource
from minisgl.models.decoder import Model

if TYPE_CHECKING:
    from minisgl.engine.sampler import Sampler

__all__ = ["Kernels", "ModelConverter", "convert", "load_converted"]


class ModelConverter:
    """The base of model converters. Its methods change nothing; a converter overrides those that it needs."""

    def before_loading(self, model: nn.Module) -> None:
        """Change how the layers of ``model`` store weights. Called once, when the model has been built."""

    def open(self, path: str | Path) -> AbstractContextManager[WeightSource] | None:
        """Open the model's weights. The first converter that returns some decides. None: it leaves them to others."""
        return None

    def after_loading(self, model: nn.Module) -> None:
        """Change what the layers of ``model`` compute with. Called once, when all weights have been loaded."""

    def prepare(self, model: nn.Module, rows: int) -> None:
        """Compile what steps of 1 to ``rows`` tokens need. Called once, before the KV pool is allocated."""


class Kernels(ModelConverter):
    """What the group ``kernels`` builds: faster functions for the whole engine. This class has none."""

    def convert_sampler(self, sampler: Sampler) -> None:
        """Replace the functions of ``sampler`` that choose tokens. Called once, when the runner has been built."""

    def ready(self) -> None:
        """Begin to count late compilations, if the kernels do. Called once, when the engine has warmed up."""


def convert(model: nn.Module, classes: Mapping[type, type]) -> None:
    """Give each module of ``model`` whose class is exactly a key of ``classes`` the class that it maps to.

    The new class is a subclass. The module keeps its parameters, its names in a checkpoint, and all references to it.
    """
    for module in model.modules():
        if (new := classes.get(type(module))) is not None:
            module.__class__ = new


def load_converted(model: Model, source: WeightSource, converters: Sequence[ModelConverter]) -> None:
    """Load the weights of a model that has just been built, with what the converters change before and after it."""
    module = model if isinstance(model, nn.Module) else nn.Module()
    for converter in converters:
        converter.before_loading(module)
    model.load(source)
    for converter in converters:
        converter.after_loading(module)
