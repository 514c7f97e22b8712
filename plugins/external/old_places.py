"""Public names that moved in 0.3: plugins find them at their old places too, with a warning."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType
from typing import Any

__all__ = ["offer_old_places"]

log = logging.getLogger(__name__)

MOVED = MappingProxyType(
    {
        "minisgl.kvcache": dict.fromkeys(
            ("InsertResult", "Key", "MatchResult", "PrefixCache"), "minisgl.plugins.cache.base"
        ),
        "minisgl.layers": {"MoELayer": "minisgl.plugins.models.experts"},
        "minisgl.models.converter": {"Quantization": "minisgl.plugins.quantization.base"},
        "minisgl.moe": {"MoeBackend": "minisgl.plugins.moe"},
        "minisgl.scheduler": {"DraftProposer": "minisgl.plugins.speculation"},
        "minisgl.scheduler.base": {
            "DraftProposer": "minisgl.plugins.speculation",
            "Constraint": "minisgl.plugins.constraint.base",
            "mask_of": "minisgl.plugins.constraint.base",
            "pack_mask": "minisgl.plugins.constraint.base",
        },
    }
)
"""Module → name → the module that has the name now."""


class _OldPlaces(MetaPathFinder):
    """Adds the moved names to a module when it is imported. ``minisgl.moe`` has nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        spec = PathFinder.find_spec(fullname, path, target) or ModuleSpec(fullname, None)
        spec.loader = _Adding(spec.loader)
        return spec


class _Adding(Loader):
    """Loads a module as ``loader`` does, or an empty one without, and adds the moved names."""

    def __init__(self, loader: Loader | None):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if self._loader is None else self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._loader is not None:
            self._loader.exec_module(module)
        _add_names(module)


def offer_old_places() -> None:
    """Offer the moved names at their old places from now on, also in modules that are imported later."""
    if not any(isinstance(finder, _OldPlaces) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldPlaces())
        for name in MOVED.keys() & sys.modules.keys():
            _add_names(sys.modules[name])


def _add_names(module: ModuleType) -> None:
    module.__dict__["__getattr__"] = _getter(module.__name__)


def _getter(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, which logs a warning that says where a name is now."""

    def get(name: str) -> Any:
        place = MOVED[module].get(name)
        if place is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        log.warning("%s.%s has moved: write `from %s import %s` (docs/upgrade-0.3.md)", module, name, place, name)
        return getattr(importlib.import_module(place), name)

    return get
