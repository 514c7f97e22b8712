"""Lazy modules: they are imported at their first use, and only once."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout.strip()


def test_inspection_does_not_load() -> None:
    """Functions of ``inspect``, and others that examine a lazy module, do not load it."""
    code = """
        import inspect, sys
        from minisgl.plugins.external.lazy import lazy
        assert lazy("torch") and lazy("torch")
        import torch
        inspect.isroutine(torch); isinstance(torch, type); hasattr(torch, "__wrapped__"); repr(torch); dir(torch)
        inspect.getmodule(lazy)
        print("torch._C" in sys.modules)
    """
    assert run(code) == "False"


@pytest.mark.parametrize(
    "use",
    [
        "import torch; torch.float32",
        "from torch import nn",
        "import torch.nn.functional as F; F.relu",
        "import torch.distributed as dist; dist.is_available()",
    ],
)
def test_first_use_loads_once(use: str) -> None:
    code = f"""
        import sys
        from minisgl.plugins.external.lazy import LazyModule, lazy
        lazy("torch")
        {use}
        import torch
        import torch.nn
        assert not isinstance(torch, LazyModule)
        assert torch.nn is sys.modules["torch.nn"] and torch.nn.__spec__.name == "torch.nn"
        assert torch.nn.__spec__.loader is not None and torch.nn.__spec__.origin.endswith("__init__.py")
        print(float(torch.nn.Linear(2, 2)(torch.zeros(1, 2)).sum()) is not None, lazy("torch"))
    """
    assert run(code) == "True False"


def test_package_not_installed() -> None:
    code = """
        from minisgl.plugins.external.lazy import lazy
        print(lazy("no_such_package"))
        try:
            import no_such_package
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert run(code).split() == ["False", "no_such_package"]
