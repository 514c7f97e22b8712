"""Modules that are imported when they are first used. Light processes install one for torch before they load plugins.

The library's own ``importlib.util.LazyLoader`` loads at *any* attribute access, ``__class__`` included, so that
merely looking for hooks in a plugin would import torch; and ``import torch.nn`` after it runs ``torch.nn`` twice.
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
    """Runs its code at the first access of a name that a module does not have before it is run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        load(self)
        return getattr(self, name)


def lazy(name: str) -> bool:
    """Make ``import name`` free from here on in this process; its first use pays. False where it is loaded already.

    A package that is not installed stays absent: importing it raises as ever.
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
    """Run a lazy module's code now. Nothing happens where that was done."""
    spec = module.__spec__
    if not isinstance(module, LazyModule) or spec is None or spec.loader is None:
        return
    with spec.loader_state:
        if isinstance(module, LazyModule):
            setattr(module, "__class__", ModuleType)  # noqa: B010 - a checker knows only the class it had
            sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _Submodules) and f.name == spec.name)]
            spec.loader.exec_module(module)


class _Submodules(importlib.abc.MetaPathFinder):
    """``import torch.nn`` needs torch itself first; when torch has brought ``torch.nn`` along, that is the one."""

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
        # importlib prefers the spec of a module that has appeared meanwhile, and would run that module again.
        sys.modules[fullname].__spec__ = None
        return spec


class _Loaded(importlib.abc.Loader):
    """Gives the import system the module that is already there, with the spec it had."""

    def __init__(self, module: ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
