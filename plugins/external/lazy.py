"""Lazy modules: a lazy module is imported at its first use.

Processes that do not compute (the API server, the tokenizers) make torch a lazy module before they load plugins.
``importlib.util.LazyLoader`` of the standard library does not work for this: it imports the module at *any* attribute
access, even of ``__class__``, so the search for hooks in a plugin would import torch. It also runs ``torch.nn`` twice
when ``import torch.nn`` follows.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A module whose code runs at the first access to a name that the module defines."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        load(self)
        return getattr(self, name)


def lazy(name: str) -> bool:
    """Make the module ``name`` lazy in this process. Return whether it is lazy now.

    The result is False if the module is imported already, or is not installed. Importing a module that is not installed
    raises ModuleNotFoundError as usual.
    """
    if name in sys.modules:
        return isinstance(sys.modules[name], LazyModule)
    spec = importlib.util.find_spec(name)
    if spec is None:
        return False
    spec.loader_state = threading.RLock()
    module = LazyModule(name)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
    module.__file__ = spec.origin
    if spec.submodule_search_locations is not None:
        module.__path__ = spec.submodule_search_locations
    sys.modules[name] = module
    sys.meta_path.insert(0, _Submodules(name))
    return True


def load(module: ModuleType) -> None:
    """Run a lazy module's code now, if it has not run yet."""
    spec = module.__spec__
    if not isinstance(module, LazyModule) or spec is None or spec.loader is None:
        return
    with spec.loader_state:
        if isinstance(module, LazyModule):
            setattr(module, "__class__", ModuleType)  # noqa: B010 - type checkers reject an assignment to __class__
            sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _Submodules) and f.name == spec.name)]
            spec.loader.exec_module(module)


class _Submodules(importlib.abc.MetaPathFinder):
    """The import hook for submodules of a lazy module.

    ``import torch.nn`` first runs torch itself. If torch has then imported ``torch.nn``, the hook returns that module.
    """

    def __init__(self, name: str):
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self.name + "."):
            return None
        load(sys.modules[self.name])
        if fullname not in sys.modules:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, _Loaded(sys.modules[fullname]))
        # If the module that torch imported kept its own spec, importlib would use that spec and run the module again.
        sys.modules[fullname].__spec__ = None
        return spec


class _Loaded(importlib.abc.Loader):
    """A loader that returns a module that is already imported, and restores the module's own spec."""

    def __init__(self, module: ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
